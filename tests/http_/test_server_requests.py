"""The requests that the server reads: in pieces, ahead of their answers, with a body to come, or not to be read."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import anyio
import pytest

from core.servers import on_both_loops, talk
from http_.conversations import alone, body_of, connected, respond
from slime_http.asgi import Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

_who = ContextVar("_who", default="nobody")


@alone
async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method, the path, the query, the headers and the body, or at once at ``/early``."""
    if scope["path"] == "/early":
        await respond(send, b"early")
        return
    body = await body_of(receive)
    if body is not None:
        parts = (scope["method"].encode(), scope["raw_path"], scope["query_string"])
        fields = b"; ".join(b"%b=%b" % pair for pair in scope["headers"])
        await respond(send, b" ".join((*parts, fields, body)))


WHOLE = {
    "GET": b"GET /a%20b?c=d HTTP/1.1\r\nHost: localhost\r\nX-Long-Name: and its value\r\n\r\n",
    "POST": b"POST /p HTTP/1.1\r\nContent-Length: 11\r\nHost: localhost\r\n\r\nhello world",
    "chunked POST with trailers": b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n"
    b"6\r\n world\r\n0\r\nX-Trailer: t\r\nX-More: u\r\n\r\n",
    "two requests": b"POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\none" + GET % b"2",
}  # fmt: skip


@pytest.mark.parametrize("what", WHOLE)
async def test_a_request_may_be_split_at_every_byte(what: str) -> None:
    raw = WHOLE[what]
    async with serving(echo) as url:
        expected = await talk(url, raw + LAST)
        assert expected.count(b"HTTP/1.1 200 OK") == raw.count(b" HTTP/1.1") + 1
        async with connected(url) as client:
            for at in range(1, len(raw)):
                await client.say(raw[:at], raw[at:] + raw[:at], raw[at:])
                for _ in range(2):
                    for _ in range(raw.count(b" HTTP/1.1")):
                        answer = await client.answer()
                        assert b"\r\n\r\n" + answer.body in expected, at
                        assert answer.status == 200, at
            await client.say(*(raw[at : at + 1] for at in range(len(raw))), LAST)
            assert await client.rest() == expected


async def test_trailers_are_no_headers() -> None:
    async with serving(echo) as url:
        assert b"x-trailer" not in await talk(url, WHOLE["chunked POST with trailers"] + LAST)


async def test_targets_are_passed_as_they_stand() -> None:
    async with serving(echo) as url, connected(url) as client:
        for target, seen in (
            (b"*", b"OPTIONS * "),
            (b"/a%2Fb;c?d=%20&&e?f", b"OPTIONS /a%2Fb;c d=%20&&e?f"),
            (b"http://u:p@elsewhere:1/x?y#z", b"OPTIONS /x y"),
            (b"//x//y/../z", b"OPTIONS //x//y/../z "),
        ):
            await client.say(b"OPTIONS %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
            assert (await client.answer()).body == seen + b" host=localhost "


# Requests ahead of their answers.


async def test_requests_ahead_are_served_one_by_one_in_order() -> None:
    running = most = 0
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.append(scope["path"])
        await anyio.sleep(0.001 * (len(begun) % 3))
        await respond(send, scope["path"].encode(), await body_of(receive))
        running -= 1

    paths = [b"%d" % number for number in range(50)]
    async with serving(alone(app)) as url, connected(url) as client:
        for path in paths:
            await client.say(b"POST /%b HTTP/1.1\r\nContent-Length: 3\r\n\r\n%03d" % (path, int(path)))
        for path in paths:
            assert (await client.answer()).body == b"/%b%03d" % (path, int(path))
    assert most == 1
    assert begun == [f"/{path.decode()}" for path in paths]


async def test_no_more_than_some_requests_are_read_ahead() -> None:
    go_on = asyncio.Event()
    connection = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal connection
        connection = receive.__self__._connection  # type: ignore[attr-defined]  # how many wait is nobody's business
        await go_on.wait()
        await respond(send, b"ok")

    async with serving(alone(app)) as url, connected(url) as client:
        for _ in range(100):
            await client.say(GET % b"", b"")
        assert connection is not None
        assert len(connection._waiting) < 20
        assert not connection.transport.is_reading()
        go_on.set()
        for _ in range(100):
            assert (await client.answer()).body == b"ok"
        assert connection.transport.is_reading()


async def test_a_request_sees_no_variables_of_the_one_before() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(_who.get())
        _who.set(scope["path"])
        await anyio.sleep(0.01)  # a large body is read no further meanwhile
        await body_of(receive)
        await respond(send, b"ok")

    async with serving(alone(app)) as url, connected(url) as client:
        for _ in range(2):
            await client.say(3 * (GET % b"ahead"))
            for _ in range(3):
                await client.answer()
            await client.say(b"POST /large HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000))
            await client.answer()
    assert seen == ["nobody"] * 8


async def test_behind_a_close_nothing_is_served() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await respond(send, b"ok")

    async with serving(alone(app)) as url:
        reply = await talk(url, GET % b"first" + LAST + GET % b"hidden")
        assert reply.count(b"HTTP/1.1 200 OK") == 2
        reply = await talk(url, b"GET /1.0 HTTP/1.0\r\n\r\n" + GET % b"hidden")
        assert reply.count(b"HTTP/1.1 200 OK") == 1
    assert seen == ["/first", "/last", "/1.0"]


async def test_a_body_behind_its_answer_is_thrown_away() -> None:
    late = b"POST /early HTTP/1.1\r\nContent-Length: 300000\r\n\r\n"
    async with serving(echo) as url, connected(url) as client:
        for _ in range(3):
            await client.say(late)
            assert (await client.answer()).body == b"early"
            for _ in range(3):
                await client.say(bytes(100_000))
            await client.say(GET % b"next")
            assert (await client.answer()).body.startswith(b"GET /next")


# Requests that are refused.

ABSURD = {
    "a line of nonsense": b"NONSENSE\r\n\r\n",
    "a path beyond ASCII": b"GET /\xe9 HTTP/1.1\r\n\r\n",
    "a target without a slash": b"GET a HTTP/1.1\r\n\r\n",
    "a tunnel": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
    "an upgrade with a body": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 1\r\n\r\nx",
    "a length that is none": b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
}


@pytest.mark.parametrize("what", ABSURD)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
async def test_nonsense_is_a_400_and_closes(what: str, first: bool) -> None:
    async with serving(echo) as url, connected(url) as client:
        if not first:
            await client.say(GET % b"")
            await client.answer()
        await client.say(ABSURD[what])
        answer = await client.answer()
        assert (answer.status, answer.values(b"connection")) == (400, [b"close"])
        assert await client.rest() == b""


async def test_nonsense_ahead_of_its_turn_is_one_400() -> None:
    """The request before it is told that nobody waits for it."""
    told = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/second":
            while (await receive())["type"] != "http.disconnect":
                pass
            await respond(send, b"for nobody")  # which is no error
            told.set()
        await respond(send, b"ok")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET % b"first", GET % b"second", GET % b"third" + b"NONSENSE\r\n\r\n")
        assert (await client.answer()).body == b"ok"
        assert (await client.answer()).status == 400
        assert await client.rest() == b""
        with anyio.fail_after(5):
            await told.wait()


async def test_nonsense_in_a_body_that_is_answered_gets_no_answer() -> None:
    async with serving(echo) as url, connected(url) as client:
        await client.say(b"POST /early HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await client.answer()).body == b"early"
        await client.say(b"nonsense\r\n")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /add HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /add HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        GET % b"add" + b"NONSENSE\r\n\r\n",
    ],
    ids=["coding", "chunk", "behind it"],
)
async def test_a_request_that_is_refused_is_not_begun(sent: bytes) -> None:
    begun = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])  # it may do so without a look at the body
        await respond(send, b"ok")

    async with serving(alone(app)) as url:
        assert (await talk(url, sent)).startswith(b"HTTP/1.1 400 ")
        assert (await talk(url, LAST)).startswith(b"HTTP/1.1 200 ")
    assert begun == ["/last"]
