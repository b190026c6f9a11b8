"""Records whose home was the disk stay when a remote store becomes the home."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from deadlines import until
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.errors import TierFailed
from slime_tiered_store.record_rows import namespace_of, tokens_of
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.settings import TierSettings, open_tiers
from store_flags import tier_flags

pytestmark = pytest.mark.anyio

SLOTS = 20
#: As many as the disk takes.
OLD = {number.to_bytes(16, "big"): bytes([number]) * 100 for number in range(15)}
NEW = {(100 + number).to_bytes(16, "big"): bytes([number]) * 100 for number in range(30)}


@asynccontextmanager
async def records(path: Path, *, remote: bool = True) -> AsyncIterator[ColdRecords]:
    """A store with a disk, and with a remote tier that is larger; each run writes a note."""
    tier_flags("file", path / "remote")
    settings = TierSettings(
        memory_bytes=4 * LAYOUT.block_bytes,
        ssd=str(path / "disk"),
        ssd_bytes=(1 << 16) + SLOTS * 4096,
        remote=(path / "remote").as_uri() if remote else "",
    )
    tiers = await open_tiers(settings, LAYOUT.block_bytes)
    kept = ColdRecords(wait_s=1.0, stops_on_loss=False)
    try:
        async with TieredStore(LAYOUT, tiers.memory, tiers.ssd, tiers.remote) as store:
            each: list[Any] = [tier for tier in (tiers.memory, tiers.ssd, tiers.remote) if tier is not None]
            with kept.kept_in(store, each, tiers.logs):
                await kept.notes()
                await kept.copy([b"opening"], b"closing")
                await kept.note(b"begun")
                yield kept
    finally:
        await tiers.aclose()


async def a_run_on_the_disk(path: Path) -> None:
    async with records(path, remote=False) as kept:
        await kept.keep(list(OLD.items()))


async def adopt(kept: ColdRecords, *known: dict[bytes, bytes]) -> None:
    sizes = {key: len(content) for each in known for key, content in each.items()}
    assert await kept.adopt(sizes) == []


async def is_all_there(kept: ColdRecords, *known: dict[bytes, bytes]) -> bool:
    return all([await kept.fetch(list(each)) == list(each.values()) for each in known])


async def never(key: bytes) -> bool:
    """No router has deleted a record."""
    return False


def evicted(kept: ColdRecords) -> int:
    (number,) = (engine.num_evicted_blocks for engine, _ in kept.tiers if engine.name == "ssd")
    return number


async def test_disk_evicts_nothing_before_it_is_copied(tmp_path: Path) -> None:
    """Also records that are learnt of later, as those of experts are in a shared store."""
    await a_run_on_the_disk(tmp_path)
    new, learnt = list(NEW.items()), dict(list(OLD.items())[:3])
    async with records(tmp_path) as kept:
        await adopt(kept, {key: content for key, content in OLD.items() if key not in learnt})
        await kept.keep(new[:20])
        assert evicted(kept) == 0
        await kept.move()
        await kept.keep(new[20:])
        assert evicted(kept) > 0
        kept.learn({key: len(content) for key, content in learnt.items()})
        assert await is_all_there(kept, OLD, NEW)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD, NEW)
        assert await is_all_there(kept, OLD, NEW)
        before = evicted(kept)
        await kept.keep([(b"x" * 16, b"x")])
        assert evicted(kept) > before, "all was copied by the run before"


async def test_disk_that_was_the_home_again_is_copied_again(tmp_path: Path) -> None:
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        await kept.move()
    later = {b"later".ljust(16): b"x"}
    async with records(tmp_path, remote=False) as kept:
        await adopt(kept, OLD)
        await kept.replace_notes([b"all"])
        await kept.keep(list(later.items()))
    async with records(tmp_path) as kept:
        await adopt(kept, OLD, later)
        await kept.move()
        await kept.keep(list(NEW.items()))
        assert await is_all_there(kept, OLD, later, NEW)


async def test_record_that_is_forgotten_while_it_is_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        home: Any = kept.tiers[-1][1]
        write = home.write

        async def forget_and_write(blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
            kept.forget(list(OLD)[:5])
            await write(blocks, sources)

        monkeypatch.setattr(home, "write", forget_and_write)
        await kept.move()
    blocks = [path for path in (tmp_path / "remote").glob("??/*") if path.is_file()]
    assert len(blocks) == len(OLD) - 5


def damage(path: Path, block: Block) -> None:
    """Change a byte of a block on the disk."""
    with (path / "disk" / "blocks").open("r+b", buffering=0) as file:
        content = bytearray(os.pread(file.fileno(), 4096, 4096 * block.id))
        assert block.key in content[:64]
        content[1000] ^= 1
        os.pwrite(file.fileno(), content, 4096 * block.id)


def disk_of(kept: ColdRecords) -> tuple[Any, dict[bytes, Block]]:
    """The disk, and the block of each old record there."""
    ((tier, recovered),) = [(tier, engine.recovered) for engine, tier in kept.tiers if engine.name == "ssd"]
    assert kept.store is not None
    keys = {key: kept.store.sequence_meta(namespace_of(key), tokens_of(1)).key(0) for key in OLD}
    return tier, {record: Block(recovered[key], key) for record, key in keys.items()}


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The lines of the log about copies."""
    lines = [each for each in caplog.records if each.name == "slime_tiered_store.moving"]
    return [line.getMessage() for line in lines if line.levelno == level]


def says_that_all_is_copied(caplog: pytest.LogCaptureFixture) -> bool:
    end = "tier remote has all blocks of earlier runs that were in tier ssd"
    return not logged(caplog, logging.ERROR) and logged(caplog, logging.INFO)[-1] == end


async def test_damaged_blocks_are_not_copied_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await a_run_on_the_disk(tmp_path)
    rest = list(OLD)[1:]
    for _ in range(2):
        async with records(tmp_path) as kept:
            kept.was_deleted = never
            await adopt(kept, OLD)
            if not caplog.records:
                _, blocks = disk_of(kept)
                for record in rest[3:5]:
                    damage(tmp_path, blocks[record])
                kept.forget(list(OLD)[:1])
            await kept.move()
    (error,) = logged(caplog, logging.ERROR)
    assert error.startswith("2 of 15 blocks of earlier runs are damaged, and cannot be copied to tier remote")
    assert any(f"tier ssd: block {blocks[record].key.hex()} is corrupt" in error for record in rest[3:5])
    assert logged(caplog, logging.INFO)[-1] == (
        "tier remote has the intact blocks of earlier runs that were in tier ssd; 2 blocks were damaged"
    )
    async with records(tmp_path) as kept:
        kept.was_deleted = never
        await adopt(kept, OLD)
        assert [key for key, found in zip(rest, await kept.fetch(rest), strict=True) if not found] == rest[
            3:5
        ]
        assert kept.losses.count == 2


async def test_block_that_is_replaced_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        disk, blocks = disk_of(kept)
        read, first = disk.read, next(iter(OLD))

        async def read_and_forget(*args: Any) -> None:
            try:
                await read(*args)
            finally:
                kept.forget([first])

        monkeypatch.setattr(disk, "read", read_and_forget)
        damage(tmp_path, blocks[first])
        await kept.move()
        assert disk.counts.corrupt == 1
    assert says_that_all_is_copied(caplog)


@pytest.mark.parametrize("fails", [False, True])
async def test_copy_of_a_block_that_is_damaged_later_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Also if the copies begin again, since another block is not in the remote store."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("slime_tiered_store.moving._PAUSE_S", 0)
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        home: Any = kept.tiers[-1][1]
        write = home.write

        async def write_and_damage(blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
            await write(blocks, sources)
            monkeypatch.setattr(home, "write", write)
            damage(tmp_path, blocks[4])
            if fails:
                digits = blocks[0].key.hex()
                (tmp_path / "remote" / digits[:2] / digits).unlink()
                raise TierFailed("remote", "write", "file:///remote", OSError("a block is not written"))

        monkeypatch.setattr(home, "write", write_and_damage)
        await kept.move()
        assert await home.holds([block.key for block in disk_of(kept)[1].values()]) == len(OLD)
    assert says_that_all_is_copied(caplog)


async def test_failure_of_the_home_is_repeated_and_the_disk_evicts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime_tiered_store.moving._PAUSE_S", 0)
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        home: Any = kept.tiers[-1][1]
        holds, failed = home.holds, list[int]()

        async def fails(keys: Sequence[bytes]) -> int:
            failed.append(len(keys))
            raise TierFailed("remote", "holds", "file:///remote", OSError("it is away"))

        monkeypatch.setattr(home, "holds", fails)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.move)
            await until(lambda: len(failed) > 3)
            await kept.keep(list(NEW.items()))
            assert evicted(kept) == 0
            monkeypatch.setattr(home, "holds", holds)
        assert await is_all_there(kept, OLD, NEW)
    assert caplog.text.count("evicts nothing until its blocks are copied") == 1


async def test_disk_evicts_nothing_while_one_of_several_blocks_cannot_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_tiered_store.moving._PAUSE_S", 0)
    await a_run_on_the_disk(tmp_path)
    async with records(tmp_path) as kept:
        await adopt(kept, OLD)
        home: Any = kept.tiers[-1][1]
        (keys,) = (list(engine.recovered) for engine, _ in kept.tiers if engine.name == "ssd")
        obstacle = tmp_path / "remote" / keys[5].hex()[:2]
        obstacle.write_bytes(b"where the folder of a block belongs")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.move)
            await until(lambda: home.counts.errors > 2)
            await kept.keep(list(NEW.items()))
            assert evicted(kept) == 0
            obstacle.unlink()
        assert await home.holds(keys) == len(keys)
        assert await is_all_there(kept, OLD, NEW)
