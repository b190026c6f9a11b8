"""After a connection nothing of it is left: no task, no armed timer, no circle of objects."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import anyio
import anyio.lowlevel
import pytest

from core.servers import on_both_loops
from deadlines import until
from http_.conversations import alone, body_of, connected, respond, watch_server
from slime_http.asgi import Receive, Scope, Send
from slime_http.server_request import ServerRequest
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def cancel_this() -> None:
    """Cancel the running task; nobody keeps it, as its error would lead back to it."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def serve_all_kinds(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/fails":
        raise ValueError("as asked")
    if scope["path"] == "/cancelled":
        cancel_this()
        await anyio.lowlevel.checkpoint()
    if scope["path"] == "/waits":
        await body_of(receive)
    else:
        await respond(send, scope["path"].encode(), await body_of(receive) or b"")


KINDS = {
    "plain": GET % b"",
    "closed": b"GET / HTTP/1.0\r\n\r\n",
    "with a body": (POST % (b"", 4)) + b"abcd",
    "refused": b"NONSENSE\r\n\r\n",
    "failed": GET % b"fails",
    "cancelled": GET % b"cancelled",
    "half": b"GET / HTTP",
    "left": POST % (b"waits", 4),
    "ahead": 3 * (GET % b""),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_of_a_connection_is_left(kind: str) -> None:
    """No task, no armed timer, and no circle of objects of which one is the server's."""
    asked = KINDS[kind]
    before = asyncio.all_tasks()
    async with serving(alone(serve_all_kinds)) as url:
        serving_tasks = asyncio.all_tasks()
        gc.collect()
        gc.disable()
        try:
            with pytest.MonkeyPatch.context() as patch:
                seen = watch_server(patch)
                for _ in range(50):
                    async with connected(url) as client:
                        await client.say(asked, b"")
                        if kind not in ("half", "left"):
                            assert not await client.is_left_waiting(1)
                await until(lambda: seen.open == 0)
            assert asyncio.all_tasks() <= serving_tasks
            timers = [connection._timer for connection in seen.connections]
            timers += [connection.flow._timer for connection in seen.connections]
            assert all(timer is None or timer.cancelled() for timer in timers)
            seen.connections.clear()
            seen.written.clear()
            del timers, client
            await anyio.sleep(0.01)  # what the loop still holds of the last one
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(type(each).__name__ for each in gc.garbage)
            assert not left & Counter(
                dict.fromkeys(("Protocol", "ServerRequest", "WriteFlow", "Task", "coroutine"), 9)
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert asyncio.all_tasks() == before


async def test_a_thousand_requests_leave_nothing_on_their_connection() -> None:
    async with serving(alone(serve_all_kinds)) as url, connected(url) as client:
        await client.say(GET % b"")
        await client.answer()
        gc.collect()
        gc.disable()
        try:
            for _ in range(500):
                await client.say(GET % b"one" + POST % (b"two", 1) + b"!")
                assert (await client.answer()).body == b"/one"
                assert (await client.answer()).body == b"/two!"
            alive = [each for each in gc.get_objects() if isinstance(each, ServerRequest)]
            assert len(alive) == 1
            assert gc.collect() < 50
        finally:
            gc.enable()


async def test_a_plain_request_makes_no_timer_and_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    seen = watch_server(monkeypatch)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        made.append("request")
        await respond(send, b"ok", await body_of(receive) or b"")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET % b"")
        await client.answer()
        [connection] = seen.connections
        timer = connection._timer
        assert timer is not None
        for _ in range(100):
            await client.say((POST % (b"", 4)) + b"abcd")
            assert (await client.answer()).body == b"okabcd"
            request = connection.served
            assert request is not None
            assert request._event is None
            assert connection._timer is timer
            assert connection.flow._timer is None
            assert connection.flow._drained is None


async def test_a_resting_connection_keeps_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"not read")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say((POST % (b"", 100_000)) + bytes(100_000))
        assert (await client.answer()).body == b"not read"
        newest = seen.connections[0]._newest
        assert newest is not None
        assert newest._body == []
