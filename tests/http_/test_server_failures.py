"""Answers that an application spoils: errors while nothing of them is written, and a visible break behind that."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest

from core.servers import on_both_loops
from http_.conversations import GET, GET_1_0, HEAD, Answer, alone, answering, asked, connected, respond
from slime_http.asgi import ASGIApp, Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

SPOILT: dict[str, list[Any]] = {
    "a text as a name": [("x-a", b"1")],
    "a text as a value": [(b"x-a", "1")],
    "a line break in a value": [(b"x-a", b"1\r\nx-b: 2")],
    "a bare line feed": [(b"x-a", b"1\nx-b: 2")],
    "a carriage return": [(b"content-type", b"a\rb")],
    "NUL in a value": [(b"x-a", b"\0")],
    "DEL in a value": [(b"x-a", b"\x7f")],
    "a line break in a name": [(b"x-a: 1\r\nx-b", b"2")],
    "a space behind a name": [(b"content-length ", b"2")],
    "a colon in a name": [(b"x:a", b"2")],
    "an empty name": [(b"", b"2")],
    "a name beyond ASCII": [(b"x\xe9", b"2")],
    "a length that is no number": [(b"content-length", b"two")],
    "a negative length": [(b"content-length", b"-2")],
    "a length beyond the body": [(b"content-length", b"3")],
    "a length below the body": [(b"content-length", b"1")],
    "two lengths": [(b"content-length", b"2"), (b"content-length", b"2")],
    "a length with an underscore": [(b"content-length", b"0_2")],
    "another coding": [(b"transfer-encoding", b"gzip, chunked")],
    "three things": [(b"x-a", b"1", b"2")],
}


@pytest.mark.parametrize("what", SPOILT)
async def test_headers_that_cannot_be_sent_are_a_500(what: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, stays = await asked(answering(b"ok", headers=SPOILT[what]))
    assert answer.status == 500
    assert b'"code":"HTTP_500"' in answer.body
    assert not stays
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_body_that_is_too_short_or_long_breaks_off() -> None:
    for parts in ((b"one", b""), (b"one", b"two")):
        async with (
            serving(answering(*parts, headers=[(b"content-length", b"5")])) as url,
            connected(url) as client,
        ):
            await client.say(GET)
            with pytest.raises(EOFError):
                await client.answer()


async def test_a_body_where_none_may_be_is_a_500() -> None:
    for status in (204, 304):
        answer, stays = await asked(answering(b"body", status=status, headers=[]))
        assert (answer.status, stays) == (500, False)


async def test_headers_that_were_refused_leave_no_trace() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        spoilt = [(b"transfer-encoding", b"chunked"), (b"connection", b"close"), (b"bad name", b"1")]
        with pytest.raises(RuntimeError, match="bad name"):
            await send({"type": "http.response.start", "status": 404, "headers": spoilt})
        await respond(send, b"one")

    answer, stays = await asked(alone(app))
    assert (answer, stays) == (Answer(200, [(b"content-length", b"3")], b"one"), True)


# Applications that fail.


async def fails_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("at once")


async def fails_behind_the_head(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("behind the head")


async def fails_in_groups(scope: Scope, receive: Receive, send: Send) -> None:
    raise BaseExceptionGroup("of tasks", [ValueError("one"), asyncio.CancelledError()])


async def says_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    return


async def says_half(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def returns_something(scope: Scope, receive: Receive, send: Send) -> None:
    return "something"  # type: ignore[return-value]  # that is the point


async def begins_with_the_body(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"ok"})


async def begins_twice(scope: Scope, receive: Receive, send: Send) -> None:
    for _ in range(2):
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def sends_nonsense(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})


@pytest.mark.parametrize(
    "app",
    [fails_at_once, fails_behind_the_head, fails_in_groups, says_nothing, says_half, returns_something,
     begins_with_the_body, begins_twice, sends_nonsense],
)  # fmt: skip
async def test_an_application_that_gives_no_answer_is_a_500(app: ASGIApp) -> None:
    answer, stays = await asked(alone(app))
    assert (answer.status, stays) == (500, False)


async def test_an_application_that_returns_something_is_told(caplog: pytest.LogCaptureFixture) -> None:
    await asked(alone(returns_something))
    assert "returned 'something', wanted None" in caplog.text


async def test_an_error_has_no_body_for_head() -> None:
    answer, stays = await asked(alone(fails_at_once), HEAD)
    assert (answer.status, answer.body, stays) == (500, b"", False)
    assert int(*answer.values(b"content-length")) > 0


async def test_an_application_that_fails_in_a_body_breaks_it_off() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("in the body")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET)
        with pytest.raises(EOFError):
            await client.answer()


async def test_a_broken_answer_without_a_length_is_reset() -> None:
    """An HTTP/1.0 client would take what it has for all of it: it ends with the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await anyio.sleep(0.01)
        raise ValueError("in the body")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET_1_0)
        with pytest.raises(ConnectionResetError):
            await client.answer()


async def test_a_failure_behind_the_answer_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"ok")
        await send({"type": "http.response.body", "body": b"more"})

    answer, stays = await asked(alone(app))
    assert (answer.body, stays) == (b"ok", True)
    assert "cannot be sent now" in caplog.text


async def test_a_path_breaks_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for app in (fails_at_once, says_nothing):
        await asked(alone(app), GET.replace(b"/ ", b"/%0aERROR:%20line "))
    assert len(caplog.records) == 2
    assert all(record.getMessage().startswith("/%0aERROR:%20line: the app") for record in caplog.records)
