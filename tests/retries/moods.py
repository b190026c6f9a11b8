"""Workers that answer as a test wants, byte by byte, and routers with the plugin before them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio

from core.servers import Arrived, Wire, answer, scripted
from plugged import routing, until
from router_core.workers import Worker
from slime_retries import Retries, Settings
from slime_testing import Running

__all__ = ["DROP", "GARBAGE", "HANG", "STREAM_HEAD", "Moody", "nobody", "refused", "routed"]

#: Acts of a worker in place of an answer: hang up, break HTTP, say nothing.
DROP, GARBAGE, HANG = b"drop", b"HTTP/9.9 what?\r\n\r\n", b"hang"


def refused(status: int, *headers: bytes) -> bytes:
    return answer(b'{"no":%d}' % status, b"X-Mine: yes", *headers, status=b"%d No" % status)


#: The head of a stream; a worker that says only this hangs up.
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Moody:
    """Answers each request as the next of ``moods`` says, those after them as ``rest`` does."""

    def __init__(self, *moods: bytes, rest: bytes = answer(b"well")) -> None:
        self.moods = list(moods)
        self.rest = rest
        self.arrived: list[Arrived] = []
        self.times: list[float] = []
        self.worker: Worker

    @property
    def lines(self) -> list[bytes]:
        return [request.line for request in self.arrived]

    async def serve(self, wire: Wire) -> None:
        while request := await wire.request():
            self.arrived.append(request)
            self.times.append(anyio.current_time())
            mood = self.moods.pop(0) if self.moods else self.rest
            if mood == DROP:
                return
            if mood == HANG:
                await wire.until_closed()
                return
            await wire.send(mood)
            if mood in (GARBAGE, STREAM_HEAD):
                return


@contextmanager
def nobody() -> Iterator[str]:
    """A URL that refuses connections; nobody else can take its port meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@asynccontextmanager
async def routed(
    *moody: Moody, plugins: Mapping[str, object] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """A router with the plugin, in a hurry, before ``moody``. At the end no lease is left and no connection busy."""
    retries = Retries(Settings(**{"initial_backoff_ms": 1} | settings))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(routing({"retries": retries, **(plugins or {})}))
        for one in moody:
            server = await stack.enter_async_context(scripted(one.serve))
            one.worker, _ = await running.router.add_worker(server.url)
        yield running
        await until(lambda: not running.router.proxy.busy_connections)
