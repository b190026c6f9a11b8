"""A router as a process of its own, from a launch line as it is published."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx

from deadlines import HANG_S
from ports import free_port

__all__ = ["Launched", "generates", "launched", "our_words", "without_effect"]

_THEIR_PROGRAMS = (
    "python -m sglang_router.launch_router",
    "./target/release/sgl-model-gateway",
    "smg launch",
    "vllm-router",
)


def without_effect(messages: Iterable[str]) -> list[str]:
    """The flags that one of ``messages`` of a log says are without effect."""
    return [message.split()[0] for message in messages if " has no effect" in message]


@dataclass(frozen=True)
class Launched:
    """A router that serves: a client of it, and the file with what it has said so far."""

    client: httpx.AsyncClient
    log: Path

    def idle_flags(self) -> list[str]:
        """The flags that the log says are without effect."""
        lines = self.log.read_text().splitlines()
        return without_effect(line.partition(" WARNING ")[2].partition(": ")[2] for line in lines)


def our_words(line: str, where: Mapping[str, str]) -> list[str]:
    """The arguments of a published line, with the addresses that it names replaced as ``where`` says."""
    program = next(program for program in _THEIR_PROGRAMS if line.startswith(program))
    words = shlex.split(line.removeprefix(program).replace("\\\n", " "))
    return [where.get(word, word) for word in words]


async def generates(client: httpx.AsyncClient, **headers: str) -> None:
    """A worker joins, and is asked."""
    with anyio.fail_after(HANG_S):
        while (await client.get("/readiness", headers=headers)).status_code != 200:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    answer = await client.post("/generate", json={"text": "Hi"}, headers=headers)
    assert answer.json()["text"] == "Hi"


@asynccontextmanager
async def launched(words: list[str], directory: Path) -> AsyncIterator[Launched]:
    """``slime-router`` with ``words``, in ``directory``, once it serves at free ports. Told to end, it must say 0."""
    port = free_port()
    log = directory / "router.log"
    metrics = ["--prometheus-port", "0"] if "--prometheus-port" in words else []
    process = _started([*words, *metrics, "--port", str(port)], log)
    try:
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=HANG_S) as client:
            await _serves(client, process, log)
            yield Launched(client, log)
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait, HANG_S) == 0, _said(log)
    finally:
        process.kill()
        process.wait()


def _started(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router_core", *words]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _said(log: Path) -> str:
    return log.read_text()


async def _serves(client: httpx.AsyncClient, process: subprocess.Popen[bytes], log: Path) -> None:
    with anyio.fail_after(HANG_S):
        while True:
            assert process.poll() is None, _said(log)
            try:
                await client.get("/liveness")
            except httpx.ConnectError:
                await anyio.sleep(0.05)
            else:
                return
