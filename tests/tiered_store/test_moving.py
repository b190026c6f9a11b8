"""Records whose home was the disk stay when a remote store becomes the home."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from deadlines import until
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.errors import TierFailed
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
