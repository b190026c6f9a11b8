"""The SSD tier after a kill at any byte, after a power cut, and with files that were cut short."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import anyio
import pytest

from router_core.errors import StartupError
from slime_tiered_store.errors import BlockCorrupt, TierFailed
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import (
    BLOCK_BYTES,
    UNSYNCED,
    Kill,
    Killed,
    PowerCut,
    got,
    is_intact,
    key_of,
    newer_index,
    put,
)

pytestmark = pytest.mark.anyio
SLOTS = 4
_ALL_CUTS = os.environ.get("SLIME_ROUTER_STORE_CUTS") == "all"
#: Each part cuts at every ``_STEP``-th byte; all parts cut at each. The one part of the default meets all alignments.
_STEP, _PARTS = (8, range(8)) if _ALL_CUTS else (29, range(1))
#: The writes before a kill bypass the page cache if they can, or go through it. None: in turn, by the byte of the cut.
_WAYS: list[bool | None] = [True, False] if _ALL_CUTS else [None]
#: Files are cut short at every so many bytes.
_SHORTER = 37 if _ALL_CUTS else 211
SIZE = Layout(BLOCK_BYTES, SLOTS).total_bytes


async def opened(path: Path, ops: FileOps = UNSYNCED) -> SsdTier:
    return await SsdTier.open([path], SIZE, BLOCK_BYTES, ops)


class Life:
    """A process that writes and forgets blocks. It notes what it was told."""

    def __init__(self, tier: SsdTier, first: int) -> None:
        self.tier = tier
        self.number = first
        self.acknowledged: dict[int, int] = {}
        self.in_doubt: set[int] = set()
        self.forgotten: set[int] = set()
        self.gone: set[int] = set()

    async def write(self, *slots: int) -> None:
        """Write new blocks into slots, of which the former blocks are forgotten."""
        numbers = {self.number + place: slot for place, slot in enumerate(slots)}
        self.number += len(slots)
        self.forget({number: slot for number, slot in self.acknowledged.items() if slot in slots})
        self.in_doubt |= numbers.keys()
        try:
            await put(self.tier, numbers)
        except TierFailed:
            self.forget(numbers)
            return
        self.in_doubt -= numbers.keys()
        self.acknowledged |= numbers
        self.gone |= self.forgotten  # a write was acknowledged since, so its record is on the disk

    def forget(self, blocks: dict[int, int]) -> None:
        self.in_doubt |= blocks.keys()
        self.forgotten |= blocks.keys()
        for number in blocks:
            self.acknowledged.pop(number, None)
        self.tier.forget([Block(slot, key_of(number)) for number, slot in blocks.items()])

    def go_on(self, tier: SsdTier) -> None:
        """Be another process, with an open tier."""
        self.tier = tier
        self.forgotten = set()

    async def live(self) -> None:
        await self.write(0, 1)
        await self.write(2)
        await self.write(1, 3)
        await self.write(0)
        await self.write(0)

    async def verify(self, after: SsdTier) -> None:
        """Check what a later process finds."""
        found = after.recovered()
        ours = {number: found[key_of(number)] for number in range(self.number) if key_of(number) in found}
        assert self.acknowledged.items() <= ours.items()
        assert not self.gone & ours.keys()
        assert ours.keys() <= self.acknowledged.keys() | self.in_doubt
        for number, slot in ours.items():
            assert await is_intact(after, number, slot)


@pytest.mark.parametrize("is_direct", _WAYS)
@pytest.mark.parametrize("part", _PARTS)
def test_all_acknowledged_blocks_are_found_after_a_kill_at_any_byte(
    tmp_path: Path, part: int, is_direct: bool | None
) -> None:
    async def killed_after(written: int) -> bool:
        path = tmp_path / str(written)
        tier = await opened(path)
        life = Life(tier, 0)
        await life.write(0, 1)
        await tier.aclose()
        direct = written % 2 == 1 if is_direct is None else is_direct
        kill = Kill(written, direct_bytes=1 if direct else 1 << 20)
        was_killed = True
        try:
            tier = await opened(path, kill.ops)
            life.go_on(tier)
        except Killed:
            pass
        else:
            try:
                await life.live()
                was_killed = False
            except Killed:
                pass
            await tier.aclose()
        again = await opened(path)
        await life.verify(again)
        if written % 5 == 0:
            life.go_on(again)
            await life.write(2, 3)
            await again.aclose()
            again = await opened(path)
            await life.verify(again)
        await again.aclose()
        return was_killed

    async def all_bytes() -> None:
        written = part
        while await killed_after(written):
            written += _STEP

    anyio.run(all_bytes)


@pytest.mark.parametrize("fails", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(40))
async def test_all_acknowledged_blocks_are_found_after_a_power_cut(
    tmp_path: Path, seed: int, fails: float
) -> None:
    random = Random(seed)
    tier = await opened(tmp_path)
    life = Life(tier, 0)
    await tier.aclose()
    for _ in range(6):
        direct_bytes = random.choice([1, 1 << 20])
        disk = PowerCut(random, random.choice([16, 64, 512]), random.randrange(60), fails, direct_bytes)
        with suppress(Killed, StartupError):
            tier = await opened(tmp_path, disk.ops)
            life.go_on(tier)
            with suppress(Killed):
                while True:
                    await life.write(*random.sample(range(SLOTS), random.randrange(1, SLOTS + 1)))
            await tier.aclose()
        disk.cut()
        after = await opened(tmp_path)
        await life.verify(after)
        await after.aclose()


async def test_a_kill_while_the_index_is_rewritten_loses_nothing(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    await put(first, {1: 0, 2: 1, 3: 2})
    await first.aclose()
    for written in range(250):
        with pytest.raises(Killed):
            await opened(tmp_path, Kill(written % 125).ops)
        again = await opened(tmp_path)
        assert again.recovered() == {key_of(1): 0, key_of(2): 1, key_of(3): 2}
        await again.aclose()


async def test_an_index_cut_short_loses_only_the_records_behind_the_cut(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    for number in range(SLOTS):
        await put(tier, {number: number})
    await tier.aclose()
    index, other = newer_index(tmp_path)
    content = index.read_bytes()
    for size in range(32, 32 + 32 * SLOTS + 1):
        index.write_bytes(content[:size])
        other.write_bytes(b"")
        again = await opened(tmp_path)
        # the start fills the file up with zeros, which may be what was cut off
        filled = content[:size].ljust(len(content), b"\0")
        records = [slice(32 + 32 * number, 64 + 32 * number) for number in range(SLOTS)]
        whole = [number for number, record in enumerate(records) if filled[record] == content[record]]
        assert again.recovered() == {key_of(number): number for number in whole}
        assert len(whole) - (size - 32) // 32 in (0, 1)
        await again.aclose()
        other.unlink()


async def test_blocks_cut_short_are_refused(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await put(tier, {number: number for number in range(SLOTS)})
    await tier.aclose()
    blocks = tmp_path / "blocks"
    content = blocks.read_bytes()
    for size in range(0, len(content), _SHORTER):
        blocks.write_bytes(content[:size])
        again = await opened(tmp_path)
        for number in range(SLOTS):
            if size >= number * 4096 + 64 + BLOCK_BYTES:  # the file is made whole at the start
                assert await is_intact(again, number, number)
            else:
                with pytest.raises(BlockCorrupt):
                    await got(again, number, number)
        os.truncate(blocks, size)  # while it is open
        if size < 3 * 4096:
            with pytest.raises(TierFailed, match="the file ends within the slots 3 to 3"):
                await got(again, 3, 3)
        await again.aclose()


async def test_any_changed_byte_of_a_block_is_found(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await put(tier, {7: 0})
    content = (tmp_path / "blocks").read_bytes()
    with (tmp_path / "blocks").open("r+b", buffering=0) as blocks:
        for offset in range(64 + BLOCK_BYTES):
            os.pwrite(blocks.fileno(), bytes([content[offset] ^ 1]), offset)
            with pytest.raises(BlockCorrupt, match=key_of(7).hex()):
                await got(tier, 7, 0)
            os.pwrite(blocks.fileno(), content[offset : offset + 1], offset)
    assert await is_intact(tier, 7, 0)
    assert tier.counts.corrupt == 64 + BLOCK_BYTES
    await tier.aclose()


async def test_a_record_that_failed_does_not_name_a_block_written_later(tmp_path: Path) -> None:
    """The record reached the disk although its write failed. The next write of the slot is torn by a kill."""
    steps: list[str] = []

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        data = b"".join(pieces)
        if data.startswith(b"SLIMEBLK") and "failed" in steps:
            os.pwrite(fd, data[:100], offset)
            steps.append("killed")
        if "killed" in steps:
            raise Killed
        written = os.pwritev(fd, pieces, offset)
        if steps == ["armed"] and len(data) == 32:
            steps[:] = ["failed"]
            raise OSError(5, "Input/output error")
        return written

    tier = await opened(tmp_path, FileOps(pwritev=pwritev))
    steps.append("armed")
    with pytest.raises(TierFailed):
        await put(tier, {1: 0})
    with pytest.raises(Killed):
        await put(tier, {2: 0})
    await tier.aclose()
    again = await opened(tmp_path)
    assert again.recovered() == {}
    await again.aclose()
