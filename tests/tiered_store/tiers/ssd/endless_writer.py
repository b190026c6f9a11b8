"""A process that writes blocks until it is killed: ``python endless_writer.py DIR FIRST``.

It prints ``begin NUMBER ID`` before it forgets the former block of a slot, and ``done NUMBER ID`` when the write of
the new one has returned.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import BLOCK_BYTES, key_of, put

SLOTS = 8
SIZE = Layout(BLOCK_BYTES, SLOTS).total_bytes


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(path: Path, first: int) -> None:
    tier = await SsdTier.open([path], SIZE, BLOCK_BYTES)
    lies = {block_id: key for key, block_id in tier.recovered().items()}
    say("open", 0, 0)

    async def write(block_id: int) -> None:
        number = first + block_id
        while True:
            say("begin", number, block_id)
            if block_id in lies:
                tier.forget([Block(block_id, lies[block_id])])
            await put(tier, {number: block_id})
            lies[block_id] = key_of(number)
            say("done", number, block_id)
            number += SLOTS

    async with anyio.create_task_group() as tasks:
        for block_id in range(SLOTS):
            tasks.start_soon(write, block_id)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
