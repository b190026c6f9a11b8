"""What a router process keeps for clients that do not read: a little, for a while."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
import anyio.abc
import httpx
import pytest

from core.servers import Wire, dial, scripted

pytestmark = pytest.mark.anyio

MIB = 1 << 20
STREAM = 200 * MIB
#: What may come on top of a process at rest: allocators round up, and a read is 256 KiB.
GROWTH = 32 * MIB


class Process:
    """A router of its own: where it listens, and how much memory it has."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._status = Path(f"/proc/{pid}/status")

    @property
    def peak(self) -> int:
        """The most memory that it ever had, in bytes."""
        found = re.search(r"^VmHWM:\s+(\d+) kB$", self._status.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "router_core", "--no-default-plugins", "--port", "0", *flags]
    async with await anyio.open_process(command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE) as process:
        assert process.stderr is not None
        try:
            said = ""
            with anyio.fail_after(20):
                while not (found := re.search(r"listening on (\S+)\n", said)):
                    said += (await process.stderr.receive()).decode()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, process.stderr)
                yield Process(found[1], process.pid)
                tasks.cancel_scope.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def _drain(stream: anyio.abc.ByteReceiveStream) -> None:
    async for _ in stream:
        pass


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while not condition():  # noqa: ASYNC110  # what another process does is seen, not told
            await anyio.sleep(0.02)


async def test_a_fast_worker_and_a_client_that_does_not_read_cost_little_and_not_for_long() -> None:
    sent = 0
    left = asyncio.Event()

    async def fast(wire: Wire) -> None:
        nonlocal sent
        if await wire.request() is None:
            return
        wire.buffers(64 * 1024)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % STREAM)
        while sent < STREAM and await wire.send(bytes(MIB)):
            sent += MIB
        left.set()

    async with (
        scripted(fast) as worker,
        router_process("--worker-urls", worker.url, "--client-timeout-secs", "2") as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False) as client,
    ):

        async def loads() -> list[int]:
            answer = (await client.get("/workers")).json()
            return [each["load"] for each in answer["workers"]]

        while await loads() != [0]:  # noqa: ASYNC110  # the worker registers
            await anyio.sleep(0.02)
        before = router.peak
        with await dial(router.url, receive_buffer=64 * 1024) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: sent > 0)
            assert await loads() == [1]
            with anyio.fail_after(15):
                await left.wait()  # its connection is closed
            assert await loads() == [0]
            assert sent < STREAM // 4
        assert router.peak - before < GROWTH


async def test_requests_sent_ahead_without_end_cost_little() -> None:
    """A client that reads its answers, and sends faster than anybody could answer."""
    async with router_process() as router:
        before = router.peak
        with await dial(router.url) as raw:
            raw.setblocking(True)
            raw.settimeout(10)
            answered = threading.Event()

            def read() -> None:
                read = 0
                with suppress(OSError):
                    while piece := raw.recv(MIB):
                        read += piece.count(b"HTTP/1.1 200")
                        if read > 5000:
                            answered.set()

            def send() -> None:
                ahead = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
                with suppress(OSError):
                    for _ in range(200):
                        if answered.is_set():
                            break
                        raw.sendall(ahead)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, read)
                await anyio.to_thread.run_sync(send)
                raw.shutdown(2)
        assert answered.is_set()
        assert router.peak - before < 2 * GROWTH
