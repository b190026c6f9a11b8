"""A request cut short at every step of the event loop leaves nothing behind.

A step is one turn of the loop; a request that finishes after n of them is started n times and ended after
0, 1, 2, ... turns: by cancellation, as at shut-down, and by its client, who hangs up.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import anyio
import pytest
import trustme

from core.servers import Wire, answer, on_both_loops, scripted
from deadlines import HANG_S
from router_core.app import make_app
from router_core.exchange import Exchange
from router_core.proxy import relay
from router_core.request import Request
from router_core.types import Message
from routers import BARE, Start
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]

BODY = b"0123456789" * 60_000
CHUNK = b"5\r\nhello\r\n"
ANSWER = {
    "/length": (answer(BODY), BODY),
    "/chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK * 3 + b"0\r\n\r\n",
        b"hello" * 3,
    ),
    "/until-close": (b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
}
MOST_STEPS = 2000


async def _worker(wire: Wire) -> None:
    while request := await wire.request():
        path = request.line.split(b" ")[1].decode()
        whole, _ = ANSWER[path]
        half = len(whole) // 2
        await wire.send(whole[:half])
        await anyio.lowlevel.checkpoint()
        await wire.send(whole[half:])
        if path == "/until-close":
            return


@asynccontextmanager
async def served(start: Start, *, secure: bool) -> AsyncIterator[Running]:
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with ca.cert_pem.tempfile() as path:
        async with scripted(_worker, tls=context if secure else None) as worker:
            trust = ("--ca-cert-paths", path) if secure else ()
            async with start(*BARE, "--worker-urls", worker.url, *trust) as running:
                yield running


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settle(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(HANG_S):
        while not condition():  # noqa: ASYNC110  # closing takes some turns of the loop
            await anyio.sleep(0.001)


class AsgiClient:
    """An ASGI client: sends one request, and may hang up."""

    def __init__(self, path: str, body: bytes) -> None:
        self.received: list[Message] = []
        self.gone = asyncio.Event()
        self._path = path
        self._body: bytes | None = body

    @property
    def scope(self) -> dict[str, object]:
        path = self._path
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-length", b"%d" % len(self._body or b""))],
        }

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.received.append(message)
        await anyio.lowlevel.checkpoint()  # a server waits here for a slow client

    @property
    def answered(self) -> bytes | None:
        """The body, if it was whole."""
        last = self.received[-1] if self.received else {"more_body": True}
        if last.get("more_body", True):
            return None
        return b"".join(message["body"] for message in self.received[1:])


async def _answer(running: Running, exchange: Exchange, client: AsgiClient) -> None:
    rest = relay(await running.router.respond(exchange), "POST", client.send, lambda: None)
    assert rest is not None  # this client takes no answer at once
    await rest


Run = Callable[[], Coroutine[None, None, bytes | None]]
Attempt = asyncio.Task[bytes | None]


async def at_every_step(running: Running, path: str, run: Run, end: Callable[[Attempt], None]) -> int:
    """Run ``run`` as a task and ``end`` it after 0, 1, 2, ... steps; check each time that nothing is left.

    Returns the number of steps that a whole run takes.
    """
    expected = ANSWER[path][1]
    loop = asyncio.get_running_loop()
    pool = running.router.proxy
    await settle(lambda: running.router.pool.healthy == 1)
    assert await run() == expected  # warm: what is made once is there
    idle = 0 if path == "/until-close" else 1
    await settle(lambda: pool.open_connections == idle)
    await settle(lambda: not any("add_worker" in task.get_name() for task in asyncio.all_tasks()))
    tasks, files = len(asyncio.all_tasks()), open_files()
    for steps in range(MOST_STEPS):
        task = loop.create_task(run())
        for _ in range(steps):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            assert task.result() == expected
            return steps
        end(task)
        await asyncio.wait([task])
        assert [worker.in_flight for worker in running.router.pool] == [0], steps
        if not task.cancelled():
            assert task.result() in (None, expected), steps
        await settle(lambda: pool.open_connections <= idle and len(asyncio.all_tasks()) <= tasks)
        assert await run() == expected, steps  # on what is left in the pool
        await settle(lambda: pool.open_connections == idle and len(asyncio.all_tasks()) == tasks)
        await settle(lambda: open_files() <= files)
    pytest.fail(f"not done after {MOST_STEPS} steps")


def cancelled(task: Attempt) -> None:
    task.cancel()


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
async def test_a_request_cancelled_at_any_step_leaves_nothing_behind(start: Start, secure: bool) -> None:
    async with served(start, secure=secure) as running:
        for path in ANSWER:

            async def run(path: str = path) -> bytes | None:
                client = AsgiClient(path, b"{}")
                with Exchange(Request("POST", path.encode(), [], b"{}")) as exchange:
                    await _answer(running, exchange, client)
                return client.answered

            assert await at_every_step(running, path, run, cancelled) > 5


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
async def test_a_client_that_hangs_up_at_any_step_leaves_nothing_behind(
    start: Start, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_core.client._PATIENCE_S", 0.0)  # watched from the first step on
    async with served(start, secure=secure) as running:
        app = make_app(running.router)
        for path in ANSWER:
            clients: list[AsgiClient] = []

            async def run(path: str = path, clients: list[AsgiClient] = clients) -> bytes | None:
                clients.append(AsgiClient(path, b"{}"))
                await app(clients[-1].scope, clients[-1].receive, clients[-1].send)
                clients[-1].gone.set()
                return clients[-1].answered

            def hung_up(task: Attempt, clients: list[AsgiClient] = clients) -> None:
                if clients:
                    clients[-1].gone.set()
                else:
                    task.cancel()

            assert await at_every_step(running, path, run, hung_up) > 5
            assert any(client.answered is None for client in clients)


async def test_a_large_upload_cancelled_at_any_step_leaves_nothing_behind(start: Start) -> None:
    body = bytes(2 << 20)
    async with served(start, secure=False) as running:

        async def run() -> bytes | None:
            client = AsgiClient("/length", body)
            with Exchange(Request("POST", b"/length", [], body)) as exchange:
                await _answer(running, exchange, client)
            return client.answered

        assert await at_every_step(running, "/length", run, cancelled) > 5
