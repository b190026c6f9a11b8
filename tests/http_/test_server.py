"""The answers of the server, as they stand on the wire: framing, headers, and answers that an application spoils."""

from __future__ import annotations

import asyncio

import pytest

from core.servers import on_both_loops
from deadlines import until
from http_.conversations import (
    GET,
    GET_1_0,
    HEAD,
    SOON_S,
    Answer,
    alone,
    answering,
    asked,
    connected,
    respond,
    watch_server,
)
from slime_http.asgi import Receive, Scope, Send, send_whole
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

LARGE = bytes(range(256)) * 1024


# One write for each answer.


@pytest.mark.parametrize("size", [0, 5, 65_535, 65_536, 262_144])
@pytest.mark.parametrize("framed", [True, False], ids=["length", "chunked"])
async def test_a_whole_answer_is_one_write(monkeypatch: pytest.MonkeyPatch, size: int, framed: bool) -> None:
    seen = watch_server(monkeypatch)
    body = LARGE[:size]
    answer, _ = await asked(answering(body, headers=None if framed else []))
    assert answer.body == body
    assert len(seen.written) == 2  # it was asked twice
    assert all(whole.startswith(b"HTTP/1.1 200 OK\r\n") for whole in seen.written)


async def test_the_head_waits_for_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET)
        assert await client.is_left_waiting(0.05)
        go_on.set()
        assert (await client.answer()).body == b"ok"
    assert len(seen.written) == 1


async def test_an_empty_part_flushes_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        for _ in range(2):  # the second one has nothing to flush
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET)
        assert not await client.is_left_waiting(1)
        assert seen.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"]
        go_on.set()
        assert (await client.answer()).body == b"ok"
    assert seen.written[1:] == [b"ok"]


# Framing.


async def test_a_body_without_a_length_is_chunked() -> None:
    answer, stays = await asked(answering(b"one", b"", b"two", b"", headers=[]))
    assert answer.values(b"transfer-encoding") == [b"chunked"]
    assert (answer.body, stays) == (b"onetwo", True)


async def test_an_http_1_0_client_gets_no_chunks() -> None:
    for request in (GET_1_0, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"):
        answer, stays = await asked(answering(b"one", b"two", headers=[]), request)
        assert answer == Answer(200, [(b"connection", b"close")], b"onetwo")
        assert not stays
    answer, _ = await asked(answering(b"one"), GET_1_0)
    assert answer.values(b"content-length") == [b"3"]


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_a_client_of_no_known_version_gets_no_chunks(version: bytes) -> None:
    request = b"GET / HTTP/%b\r\nConnection: keep-alive\r\n\r\n" % version
    answer, stays = await asked(answering(b"one", headers=[]), request)
    assert (answer, stays) == (Answer(200, [(b"connection", b"close")], b"one"), False)


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"9")]], ids=["chunked", "length"])
async def test_an_answer_to_head_has_no_body(headers: list[tuple[bytes, bytes]]) -> None:
    answer, stays = await asked(answering(b"not ", b"shown", headers=headers), HEAD)
    assert answer == Answer(200, headers, b"")
    assert stays


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_keep_the_connection(status: int) -> None:
    answer, stays = await asked(answering(status=status, headers=[(b"etag", b"x")]))
    assert answer == Answer(status, [(b"etag", b"x")], b"")
    assert stays
    if status == 304:
        answer, stays = await asked(answering(status=status, headers=[(b"content-length", b"9")]))
        assert answer.values(b"content-length") == [b"9"]
        assert stays


@pytest.mark.parametrize("value", [b"close", b"Close", b"x, close", b"close , x"])
async def test_either_side_may_close_the_connection(value: bytes) -> None:
    closing = GET.replace(b"\r\n\r\n", b"\r\nConnection: %b\r\n\r\n" % value)
    answer, stays = await asked(answering(b"ok"), closing)
    assert answer.values(b"connection") == [b"close"]
    assert not stays
    async with (
        serving(answering(b"ok", headers=[(b"content-length", b"2"), (b"Connection", value)])) as url,
        connected(url) as client,
    ):
        await client.say(GET + GET)
        answer = await client.answer()
        assert answer.values(b"connection") == [value]
        assert await client.rest() == b""


async def test_an_unknown_status_has_no_phrase() -> None:
    answer, _ = await asked(answering(b"ok", status=299))
    assert answer.status == 299


# Bodies and headers of all kinds.


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [5, 262_144])
@pytest.mark.parametrize("framed", [True, False], ids=["length", "chunked"])
async def test_a_body_may_be_any_kind_of_bytes(kind: type, size: int, framed: bool) -> None:
    parts = [kind(LARGE[:size]), kind(b"!")]
    answer, _ = await asked(answering(*parts, headers=None if framed else []))
    assert answer.body == LARGE[:size] + b"!"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("framed", [True, False], ids=["length", "chunked"])
async def test_an_empty_body_may_be_any_kind_of_bytes(kind: type, framed: bool) -> None:
    empty = kind(b"")
    for parts, body in (((b"one", empty, empty), b"one"), ((empty,), b"")):
        answer, stays = await asked(answering(*parts, headers=None if framed else []))
        assert (answer.body, stays) == (body, True)
    assert empty == b""


async def test_a_part_may_be_changed_when_it_is_sent() -> None:
    part = bytearray(LARGE)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(16):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            part[:] = b"x" * 10  # which no transport that holds it allows
            part[:] = LARGE
        await send({"type": "http.response.body"})

    for request in (GET, GET_1_0):
        answer, _ = await asked(alone(app), request)
        assert answer.body == 16 * LARGE


async def test_headers_may_come_from_a_generator() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pairs = [
            (b"X-A", b"1"),
            (b"x-a", b"2"),
            (b"content-length", b"2"),
            (b"x-b", "\t\u00e9 ".encode("latin-1")),
        ]
        await respond(send, b"ok", headers=(pair for pair in pairs))

    answer, _ = await asked(alone(app))
    assert answer.values(b"x-a") == [b"1", b"2"]
    assert answer.values(b"x-b") == [b"\t\xe9 "]


async def test_an_application_that_says_chunked_leaves_it_to_the_server() -> None:
    coding = (b"transfer-encoding", b"Chunked")
    answer, _ = await asked(answering(b"one", headers=[coding]))
    assert answer == Answer(200, [(b"transfer-encoding", b"chunked")], b"one")
    answer, _ = await asked(answering(b"one", headers=[coding, (b"content-length", b"3")]))
    assert answer == Answer(200, [(b"content-length", b"3")], b"one")
    answer, _ = await asked(answering(b"one", headers=[coding]), GET_1_0)
    assert answer == Answer(200, [(b"connection", b"close")], b"one")
    answer, _ = await asked(answering(headers=[coding], status=204))
    assert answer == Answer(204, [], b"")


# Whole answers without messages.


async def test_whole_answer_waits_for_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    large = LARGE * 32
    at_once: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        rest = send_whole(send, 200, [(b"content-length", b"%d" % len(large))], large)
        at_once.append(rest is None)
        if rest is not None:
            await rest

    async with serving(alone(app)) as url, connected(url, receive_buffer=64 * 1024) as client:
        await client.say(GET * 2)
        await until(lambda: len(at_once) == 2)
        assert len(seen.written) == 1
        for _ in range(2):
            assert (await client.answer()).body == large
    assert at_once == [True, False]


async def test_whole_answer_to_a_client_that_has_gone_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        rest = send_whole(send, 200, [(b"content-length", b"2")], b"ok")
        assert rest is not None
        await rest
        ended.set()

    async with serving(alone(app)) as url:
        async with connected(url) as client:
            await client.say(GET)
            await until(lambda: bool(seen.connections) and seen.connections[0].served is not None)
        await asyncio.wait_for(ended.wait(), SOON_S)
    assert seen.written == []


async def test_whole_answer_comes_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for body in (b"one", b"two"):
            if (rest := send_whole(send, 200, [(b"content-length", b"3")], body)) is not None:
                with pytest.raises(RuntimeError, match="cannot be sent now"):
                    await rest

    answer, kept = await asked(alone(app))
    assert (answer.body, kept) == (b"one", True)
