"""The end of serving: what is under way finishes within the grace period, the rest is cut, and nothing stays.

The same with signals and a process of its own: ``e2e/test_shutdown.py``.
"""

from __future__ import annotations

import asyncio

import anyio
import httpx
import pytest

from core.servers import Wire, answer, dial, on_both_loops, scripted
from deadlines import HANG_S
from routers import BARE, Start

pytestmark = [pytest.mark.anyio, on_both_loops]


async def test_running_requests_finish_and_new_ones_are_refused(start: Start) -> None:
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        while request := await wire.request():
            stream = b"/stream" in request.line
            if stream:
                await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            await go_on.wait()
            await wire.send(b"0\r\n\r\n" if stream else answer(b"hello"))

    answers: list[bytes] = []
    before = asyncio.all_tasks()
    async with scripted(slow) as worker, httpx.AsyncClient(trust_env=False, timeout=10) as client:

        async def ask(url: str) -> None:
            answers.append((await client.get(url)).content)

        async with anyio.create_task_group() as tasks, start(*BARE, "--worker-urls", worker.url) as running:
            for path in ("/whole", "/stream"):
                tasks.start_soon(ask, running.url + path)
            while worker.accepted < 2:  # noqa: ASYNC110  # both are under way
                await anyio.sleep(0.005)
            idle = await dial(running.url)

            async def look_and_let_go() -> None:
                assert await asyncio.get_running_loop().sock_recv(idle, 1) == b""  # closed: the end has begun
                idle.close()
                with pytest.raises(httpx.ConnectError):
                    await client.get(running.url)
                go_on.set()

            tasks.start_soon(look_and_let_go)
        assert answers == [b"hello", b"hello"]
        assert [registered.in_flight for registered in running.router.pool] == [0]
        assert running.router.proxy.open_connections == 0
    assert asyncio.all_tasks() == before


async def test_requests_past_the_grace_period_are_cut(start: Start) -> None:
    left = asyncio.Event()

    async def endless(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await wire.until_closed()
        left.set()

    before = asyncio.all_tasks()
    loop = asyncio.get_running_loop()
    async with scripted(endless) as worker:
        async with start(*BARE, "--worker-urls", worker.url, grace_s=1) as running:
            streaming, uploading = await dial(running.url), await dial(running.url)
            await loop.sock_sendall(streaming, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await loop.sock_sendall(
                uploading, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf"
            )
            received = b""
            while b"hello" not in received:
                received += await loop.sock_recv(streaming, 1 << 16)
            began = anyio.current_time()
        assert 0.9 < anyio.current_time() - began < 4
        with anyio.fail_after(HANG_S):
            await left.wait()
        assert await loop.sock_recv(streaming, 1 << 16) == b""  # and no chunk that says it is whole
        assert [registered.in_flight for registered in running.router.pool] == [0]
        assert running.router.proxy.open_connections == 0
        streaming.close()
        uploading.close()
    assert asyncio.all_tasks() == before
