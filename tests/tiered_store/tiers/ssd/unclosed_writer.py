"""A process that writes and forgets blocks, and ends without closing the tier: ``python unclosed_writer.py DIR``."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import BLOCK_BYTES, key_of, put

SLOTS = 8
SIZE = Layout(BLOCK_BYTES, SLOTS).total_bytes


async def main(path: Path) -> None:
    is_slow = threading.Event()
    began = threading.Event()

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if is_slow.is_set():
            began.set()
            time.sleep(0.3)  # a process that does not wait for this thread has ended then
        return os.pwritev(fd, pieces, offset)

    tier = await SsdTier.open([path], SIZE, BLOCK_BYTES, FileOps(pwritev=pwritev))
    await put(tier, {number: number for number in range(SLOTS)})
    is_slow.set()
    tier.forget([Block(0, key_of(0))])
    began.wait()
    tier.forget([Block(number, key_of(number)) for number in range(1, SLOTS)])


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
