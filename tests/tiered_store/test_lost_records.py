"""Router processes that have lost records: each ends, says why in one line, and leaves the rest to the next start."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S, until
from ports import free_port
from radix_cache.scripted import ScriptedEngine
from slime_engine.tokenizer import EngineTokenizer
from slime_http.asgi import ASGIApp, Receive, Scope, Send
from slime_http.serving import serving
from tiered_store.rollout import JournalledRollout, flags_of, roll

pytestmark = pytest.mark.anyio


def hanging(engine: ASGIApp, begun: anyio.Event) -> ASGIApp:
    """``engine``, but a request for embeddings gets no answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/embeddings":
            begun.set()
            await anyio.sleep_forever()
        await engine(scope, receive, send)

    return app


class Routers:
    """Router processes that run one after the other. Each has a log of its own."""

    def __init__(self, flags: list[str], path: Path, http: httpx.AsyncClient) -> None:
        self._flags = flags
        self._path = path
        self._http = http
        self._all: list[Program] = []

    def next(self, *flags: str) -> Program:
        self._all.append(Program([*self._flags, *flags], self._path / f"{len(self._all)}.log"))
        return self._all[-1]

    async def serve(self, *flags: str) -> Program:
        program = self.next(*flags)
        await program.serve(self._http)
        return program

    def kill(self) -> None:
        for program in self._all:
            program.kill()


async def ended(program: Program) -> tuple[int | None, list[str]]:
    """Wait for the end of ``program``. Returns its exit code and the lines of its log about errors."""
    await until(lambda: program.ended)
    assert "Traceback" not in program.said()
    lines = program.said().splitlines()
    return program.code, [line for line in lines if " ERROR " in line or line.startswith("slime-router: ")]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}", timeout=HANG_S) as client:
        yield client


async def test_process_that_lost_records_ends_at_once_and_the_next_one_finds_the_rest(
    tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    engine, disk, begun = ScriptedEngine(tokenizer), tmp_path / "disk", anyio.Event()
    async with serving(hanging(engine.app, begun)) as url:
        flags = ["--port", str(http.base_url.port), "--worker-urls", url, "--hf-checkpoint", checkpoint]
        flags += [*flags_of("ssd", disk), "--store-memory-bytes", "4096"]
        routers, rollout = Routers(flags, tmp_path, http), JournalledRollout(http, engine)
        try:
            first = await routers.serve()
            await roll(rollout)
            first.send(signal.SIGTERM)
            assert (await ended(first))[0] == 0

            content = (disk / "blocks").read_bytes()
            with (disk / "blocks").open("r+b") as blocks:
                last = content.rindex(b"SLIMEBLK")
                blocks.seek(last + 200)
                blocks.write(bytes([content[last + 200] ^ 1]))
            second = await routers.serve()
            lost: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(post, http)
                await begun.wait()
                for name in rollout.journal:
                    if not lost:
                        with suppress(httpx.TransportError):  # the router may end before it answers
                            lost += [] if await rollout.check(name) else [name]
                code, errors = await ended(second)
            (line,) = errors
            assert code == 1
            assert (
                f"the store has lost 1 record that it had kept, the first one: --store-ssd {disk.as_uri()}"
                in line
            )
            assert "no tier has it intact; start the router again; with --store-on-loss mark" in line
            third = await routers.serve()
            complete = [name for name in rollout.journal if await rollout.check(name)]
            assert len(complete) == len(rollout.journal) - 1
            assert f"of session {next(iter(rollout.journal.keys() - complete))!r}" in line
            third.send(signal.SIGTERM)
            await ended(third)

            os.rename(disk / "blocks", tmp_path / "blocks")
            for name in ("index.0", "index.1", "store.json"):
                (disk / name).unlink(missing_ok=True)
            without = routers.next()
            without.start()
            code, (line,) = await ended(without)
            assert code == 2
            assert f"slime-router: --store-ssd {disk.as_uri()}: " in line
            assert "records of earlier runs are lost" in line
            assert "or --store-on-loss mark to start without these records" in line
        finally:
            routers.kill()


async def post(http: httpx.AsyncClient) -> None:
    with suppress(httpx.TransportError):
        await http.post("/v1/embeddings", json={"input": "x"})
