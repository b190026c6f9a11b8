"""Answers that are sent in pieces, without a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from starlette.types import Message

from slime_rows.streamed import StreamedAnswer

pytestmark = pytest.mark.anyio

T = TypeVar("T")
PART: Message = {"type": "http.request", "body": b"x", "more_body": True}
LAST: Message = {"type": "http.request", "body": b"x", "more_body": False}


async def run(work: Callable[[], T]) -> T:
    return work()


async def sent(messages: Sequence[Message], *, is_long: bool = False) -> list[Any]:
    """The messages to a client that sends ``messages``, and the last of them again and again."""
    found: list[Any] = []
    left = list(messages)

    async def pause() -> None:
        raise AssertionError("there are no rows")

    async def receive() -> Message:
        return left.pop(0) if len(left) > 1 else left[0]

    async def send(message: Message) -> None:
        found.append(message)

    answer = StreamedAnswer((), lambda: iter((b"a", b"b")), "text/x", run, pause, is_long=is_long)
    await answer({"type": "http"}, receive, send)
    return found


@pytest.mark.parametrize("messages", [[LAST], [PART, PART, LAST, LAST]])
@pytest.mark.parametrize("is_long", [False, True])
async def test_request_that_middleware_repeats_is_no_disconnect(
    messages: Sequence[Message], *, is_long: bool
) -> None:
    start, body = await sent(messages, is_long=is_long)
    assert start["status"] == 200
    assert (b"content-length", b"2") in start["headers"]
    assert body == {"type": "http.response.body", "body": b"ab"}
