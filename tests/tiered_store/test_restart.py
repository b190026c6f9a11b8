"""Routers as processes that are killed or stopped, and start again with the same store."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S, until
from ports import free_port
from radix_cache.scripted import ScriptedEngine
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from store_flags import tier_flags
from tiered_store.rollout import SMALL, JournalledRollout, flags_of, roll

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


def run_of(path: Path) -> str:
    """The name of the run of a router, of whose log this is a part."""
    return path.name.partition(".")[0]


async def check_after_a_kill(rollout: JournalledRollout) -> None:
    complete = {name: await rollout.check(name) for name in rollout.journal}
    assert complete == {"s0": True, "s1": True, "s2": True, "s3": complete["s3"], "late": False}
    await rollout.turn("s0", [77])  # asserts that the engine got the recorded tokens
    await rollout.turn("other", [78, 79])
    assert await rollout.check("s0")
    assert await rollout.check("other")


@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_trajectories_survive_a_kill(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, tier: str
) -> None:
    engine = ScriptedEngine(tokenizer)
    flags = (*BARE, "--hf-checkpoint", checkpoint)
    async with serving(engine.app) as url:
        async with start(*flags, "--worker-urls", url, *flags_of(tier, tmp_path / "store")) as running:
            rollout = JournalledRollout(running.client, engine)
            await roll(rollout)
            shutil.copytree(
                tmp_path / "store", tmp_path / "copy"
            )  # what another process would find after SIGKILL
        async with start(*flags, "--worker-urls", url, *flags_of(tier, tmp_path / "copy")) as running:
            rollout.http = running.client
            await check_after_a_kill(rollout)
            objects = Counter(run_of(path) for path in (tmp_path / "copy" / "notes").iterdir())
            assert tier == "ssd" or objects[min(objects)] == 1, "the killed router's notes are joined"


@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_a_graceful_stop_loses_nothing(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, tier: str
) -> None:
    engine = ScriptedEngine(tokenizer)
    async with serving(engine.app) as url:
        store = ("--plugin", "sessions", *flags_of(tier, tmp_path / "store"))
        flags = (*BARE, "--hf-checkpoint", checkpoint, "--worker-urls", url, *store)
        async with start(*flags) as running:
            rollout = JournalledRollout(running.client, engine)
            await roll(rollout)
        for number in range(2):
            async with start(*flags) as running:
                rollout.http = running.client
                assert all([await rollout.check(name) for name in rollout.journal])
                body = {"text": rollout.texts["s1"]}
                found = (await rollout.http.post("/retrieve_from_text", json=body)).json()
                assert (found["candidates"], found["candidates_relation"]) == (1, "eq")
                await rollout.turn("s1", [60 + number])
                if number:
                    for name in rollout.journal:
                        assert (await rollout.http.get(f"/sessions/{name}")).status_code == 200
                        assert (await rollout.http.delete(f"/sessions/{name}")).status_code == 204
    if tier == "file":
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        left = [path for path in files if path.parent.name not in ("store", "notes")]
        # Also the blocks that earlier runs wrote are deleted, but for the first prompt: others may continue it.
        assert len(left) == 1
        objects = Counter(run_of(path) for path in files if path.parent.name == "notes")
        assert [objects[run] for run in sorted(objects)][:-1] == [1, 1]  # joined by later runs


async def test_full_disk_loses_nothing_when_a_remote_store_becomes_the_home(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine(tokenizer)
    disk = tier_flags("ssd", tmp_path / "disk", (1 << 16) + 12 * 4096)
    async with serving(engine.app) as url:
        flags = (*BARE, "--hf-checkpoint", checkpoint, "--worker-urls", url, *SMALL, *disk)
        flags += ("--store-memory-bytes", "20480")
        names = [f"s{number}" for number in range(12)]
        async with start(*flags) as running:
            rollout = JournalledRollout(running.client, engine)
            rollout.texts = {name: f"{name} has a prompt of its own" for name in names}
            for name in names[:4]:
                await rollout.turn(name, [*range(70, 100)])
        async with start(*flags, *tier_flags("file", tmp_path / "remote")) as running:
            rollout.http = running.client
            for name in names[4:]:
                await rollout.turn(name, [*range(70, 100)])
            await rollout.idle()
            assert all([await rollout.check(name) for name in names])


@pytest.mark.parametrize("has_ssd", [False, True])
async def test_second_router_reads_what_the_first_wrote(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, has_ssd: bool
) -> None:
    engine = ScriptedEngine(tokenizer)
    async with serving(engine.app) as url:
        store = flags_of("file", tmp_path / "store")
        flags = (*BARE, "--hf-checkpoint", checkpoint, "--worker-urls", url, *store)
        ssds = [tier_flags("ssd", tmp_path / f"ssd{number}") if has_ssd else () for number in range(2)]
        async with start(*flags, *ssds[0]) as one, start(*flags, *ssds[1]) as two:
            first, second = JournalledRollout(one.client, engine), JournalledRollout(two.client, engine)
            second.journal, second.texts = first.journal, first.texts
            await roll(first)
            complete = {name: await second.check(name) for name in first.journal}
            assert complete == {"s0": True, "s1": True, "s2": True, "s3": complete["s3"], "late": False}
            body = {"text": first.texts["s1"]}
            found = (await second.http.post("/retrieve_from_text", json=body)).json()
            assert (found["tokens"], found["exact"]) == (first.journal["s1"][-1][0], True)
            assert (found["candidates"], found["candidates_relation"]) == (1, "gte")
            await second.turn("s0", [77])  # asserts that the engine got the tokens of the first router
            assert not await first.check("s0")  # its last answer is in memory of the second
            for number in range(8):
                await second.turn(f"more{number}", [80 + number])
            with anyio.fail_after(HANG_S):
                while not await first.check("s0"):
                    pass  # until the second router has demoted it
            await first.turn("s0", [78])
            assert not await second.check("s0")
            assert await second.check("s2")


@pytest.mark.skipif(
    "SLIME_ROUTER_KILL_TEST" not in os.environ, reason="it starts three processes: set SLIME_ROUTER_KILL_TEST"
)
@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_processes_are_killed_and_stopped(
    tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, tier: str
) -> None:
    engine, port = ScriptedEngine(tokenizer), free_port()
    async with (
        serving(engine.app) as url,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http,
    ):
        flags = ["--port", str(port), "--worker-urls", url, "--hf-checkpoint", checkpoint]
        program = Program([*flags, *flags_of(tier, tmp_path / "store")], tmp_path / "router.log")
        rollout = JournalledRollout(http, engine)
        try:
            await program.serve(http)
            await roll(rollout)
            program.kill()
            await program.serve(http)
            await check_after_a_kill(rollout)
            before = {name: await rollout.check(name) for name in rollout.journal}
            program.send(signal.SIGTERM)
            await until(lambda: program.ended)
            await program.serve(http)
            assert {name: await rollout.check(name) for name in rollout.journal} == before
        finally:
            program.kill()
