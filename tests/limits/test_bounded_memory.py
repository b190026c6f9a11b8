"""A router process keeps little memory, for a short while, for clients that do not read."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import anyio
import httpx
import pytest

from core.servers import Wire, dial, scripted
from deadlines import HANG_S, until
from limits.processes import router_process

pytestmark = pytest.mark.anyio

MIB = 1 << 20
STREAM = 200 * MIB
#: Memory that may come on top of a process at rest: allocators round up, and a read is 256 KiB.
GROWTH = 32 * MIB


async def test_client_that_does_not_read_costs_little_memory_for_a_short_time() -> None:
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
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=HANG_S) as client,
    ):

        async def loads() -> list[int]:
            answer = (await client.get("/workers")).json()
            return [each["load"] for each in answer["workers"]]

        while await loads() != [0]:  # noqa: ASYNC110  # the worker registers
            await anyio.sleep(0.02)
        before = router.peak
        with await dial(router.url, receive_buffer=64 * 1024) as raw:
            await asyncio.get_running_loop().sock_sendall(
                raw, b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            await until(lambda: sent > 0)
            assert await loads() == [1]
            with anyio.fail_after(HANG_S):
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
            raw.settimeout(HANG_S)
            answered = threading.Event()

            def read() -> None:
                read = 0
                with suppress(OSError):
                    while piece := raw.recv(MIB):
                        read += piece.count(b"HTTP/1.1 200")
                        if read > 5000:
                            answered.set()

            def send() -> None:
                ahead = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
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
