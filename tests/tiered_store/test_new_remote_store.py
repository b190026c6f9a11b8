"""A router with an SSD gets a remote store: other routers find its sessions, and never take a part for the whole."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from deadlines import HANG_S, until
from radix_cache.scripted import ScriptedEngine
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_tiered_store.moving import Move
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from store_flags import tier_flags
from tiered_store.rollout import SMALL, JournalledRollout, roll

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


class GrowingFleet:
    """Starts routers with one engine. Each stops at a loss. The first one has had an SSD only."""

    def __init__(self, start: Start, flags: tuple[str, ...], engine: ScriptedEngine, path: Path) -> None:
        self._start = start
        self._flags = flags
        self.path = path
        self.engine = engine
        self.rollout: JournalledRollout

    @asynccontextmanager
    async def router(self, *tiers: str, at: Path | None = None, room: int = 60) -> AsyncIterator[Any]:
        """A router with these ``tiers``, "ssd" and "file", in the directory ``at``."""
        path = at if at is not None else self.path
        stores = [flag for tier in tiers for flag in tier_flags(tier, path / tier)]
        async with self._start(*self._flags, "--radix-tree-max-size", str(room), *stores) as running:
            yield running
            lost = (await running.client.get("/store")).json()["lost"]
            assert lost == 0

    def rollout_at(self, running: Any) -> JournalledRollout:
        """The rollout code, which sends its requests to this router."""
        other = JournalledRollout(running.client, self.engine)
        other.journal, other.texts = self.rollout.journal, self.rollout.texts
        return other


@pytest.fixture
async def fleet(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> AsyncIterator[GrowingFleet]:
    """The sessions s0 to s3 are on the SSD of a router that has stopped."""
    engine = ScriptedEngine(tokenizer)
    async with serving(engine.app) as url:
        router = ("--hf-checkpoint", checkpoint, "--worker-urls", url, *SMALL, "--plugin", "sessions")
        store = ("--store-memory-bytes", "40960", "--store-on-loss", "stop")
        flags = (*BARE, *router, *store)
        fleet = GrowingFleet(start, flags, engine, tmp_path / "stores")
        (tmp_path / "stores").mkdir()
        async with fleet.router("ssd") as running:
            fleet.rollout = JournalledRollout(running.client, engine)
            await roll(fleet.rollout)
        yield fleet


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """No block is copied before this event."""
    gate, copy = anyio.Event(), Move._copy

    async def copy_later(move: Move, *args: Any) -> None:
        await gate.wait()
        await copy(move, *args)

    monkeypatch.setattr(Move, "_copy", copy_later)
    return gate


async def complete(rollout: JournalledRollout) -> dict[str, bool]:
    return {name: await rollout.check(name) for name in rollout.journal}


async def until_complete(rollout: JournalledRollout, *names: str) -> None:
    with anyio.fail_after(HANG_S):
        for name in names:
            while not await rollout.check(name):
                pass


async def test_other_routers_find_the_sessions_once_they_are_copied(
    fleet: GrowingFleet, gate: anyio.Event
) -> None:
    names = list(fleet.rollout.journal)
    async with fleet.router("file", room=1000) as second:
        elsewhere = fleet.rollout_at(second)
        async with fleet.router("ssd", "file") as first, fleet.router("file") as third:
            fleet.rollout.http = first.client
            assert await complete(fleet.rollout) == dict.fromkeys(names, True)
            for running in (second, third):
                assert await complete(fleet.rollout_at(running)) == dict.fromkeys(names, False)
            # A session goes on at another router, which does not have its earlier answers yet.
            alone = JournalledRollout(second.client, fleet.engine)
            await alone.turn("s1", [77])
            assert not (await alone.shown("s1"))["complete"]
            # Another one goes on at its router, and the new answer is in the store before the earlier ones.
            await fleet.rollout.turn("s2", [*range(100, 130)])
            await fleet.rollout.turn("more", [*range(130, 160)])
            await fleet.rollout.idle()
            async with fleet.router("file") as fourth:
                for running in (second, third, fourth):
                    assert not (await fleet.rollout_at(running).shown("s2"))["complete"]
                gate.set()
                for running in (second, third, fourth):
                    await until_complete(fleet.rollout_at(running), "s0", "s2", "s3")
            async with fleet.router("file") as fifth:
                await until_complete(fleet.rollout_at(fifth), "s0", "s2", "s3")
            shown = await elsewhere.shown("s1")
            assert [leaf["tokens"] for leaf in shown["trajectories"]].count(
                fleet.rollout.journal["s1"][-1][0]
            ) == 1
            await elsewhere.turn("s0", [78])  # asserts that the engine got the tokens of the first router
            assert await elsewhere.check("s0")
            assert not await fleet.rollout.check("s0")
    async with fleet.router("ssd", "file") as first:
        fleet.rollout.http = first.client
        await until_complete(fleet.rollout, "s0", "s2", "s3")


async def test_session_that_is_deleted_before_it_is_copied_does_not_come_back(
    fleet: GrowingFleet, gate: anyio.Event
) -> None:
    async with fleet.router("ssd", "file") as first, fleet.router("file") as second:
        elsewhere = fleet.rollout_at(second)
        assert not await elsewhere.check("s0")
        second.router.components.get("ownership").forget("s0")
        await second.router.components.get("ownership")._saver.writer.flush()
        gate.set()
        await until_complete(elsewhere, "s1")
        for running in (first, second):
            assert (await running.client.get("/trajectories/s0")).status_code == 404


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The stores after each write to the remote store, as they are found after a kill."""
    found: list[Path] = []
    put = DirectoryClient.put

    async def put_and_copy(client: DirectoryClient, objects: Mapping[str, bytes]) -> None:
        await put(client, objects)
        if client.url.endswith("/stores/file"):
            found.append(tmp_path / f"after-{len(found)}")
            shutil.copytree(tmp_path / "stores", found[-1], ignore=shutil.ignore_patterns("*.tmp"))

    monkeypatch.setattr(DirectoryClient, "put", put_and_copy)
    return found


def has_closing(path: Path) -> bool:
    """Return True if the notes in the remote store say that all is copied."""
    contents: dict[str, bytes] = {}
    for note in sorted((path / "file" / "notes").glob("*-*")):
        run = note.name.partition(".")[0]
        contents[run] = contents.get(run, b"") + note.read_bytes()
    return any(b"copying" in content and b"ended" in content for content in contents.values())


def has_moved(path: Path) -> bool:
    """Return True if the router knows that all is copied."""
    return any(path.glob("file/notes/*.moved"))


async def test_kill_after_any_write_leaves_no_wrong_claim(fleet: GrowingFleet, snapshots: list[Path]) -> None:
    names = list(fleet.rollout.journal)
    async with fleet.router("ssd", "file"):
        await until(lambda: has_moved(snapshots[-1]))
        taken = list(snapshots)
    closed, claims = [has_closing(path) for path in taken], []
    for number, path in enumerate(taken):
        async with fleet.router("file", at=path) as second:
            elsewhere = fleet.rollout_at(second)
            claims.append(await complete(elsewhere))
            async with fleet.router("ssd", "file", at=path) as first:
                fleet.rollout.http = first.client
                assert await complete(fleet.rollout) == dict.fromkeys(names, True)
                await until(lambda: has_moved(path))  # noqa: B023  # it is called in this round
                await until_complete(elsewhere, *names)
            if number % 3 == 1:
                async with fleet.router("file", at=path) as third:
                    assert await complete(fleet.rollout_at(third)) == dict.fromkeys(names, True)
    assert claims == [dict.fromkeys(names, is_closed) for is_closed in closed]
    assert closed.count(False) > 4
    assert closed[-2:] == [True, True]


async def test_session_deleted_between_two_copies_is_neither_lost_nor_back(
    fleet: GrowingFleet, gate: anyio.Event
) -> None:
    names = list(fleet.rollout.journal)
    async with fleet.router("file") as second:
        elsewhere = fleet.rollout_at(second)
        async with fleet.router("ssd", "file"):
            assert await complete(elsewhere) == dict.fromkeys(names, False)
        async with fleet.router("ssd") as first:
            assert (await first.client.delete("/sessions/s0")).status_code == 204
        for _ in range(2):  # the log on the SSD says no more that the records were deleted
            async with fleet.router("ssd"):
                pass
        gate.set()
        async with fleet.router("ssd", "file") as first, fleet.router("file") as third:
            rest = [name for name in names if name != "s0"]
            for running in (first, second, third):
                await until_complete(fleet.rollout_at(running), *rest)
                assert (await running.client.get("/trajectories/s0")).status_code == 404
