"""Answers that are sent in pieces, without a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from slime_http.serving import serving
from slime_rows.body_pieces import BodyLength
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


@pytest.mark.parametrize(("length", "status"), [(2, 200), (3, 500), (1, 500)])
async def test_body_of_another_length_than_announced_is_no_answer(length: int, status: int) -> None:
    async def pause() -> None:
        raise AssertionError("there are no rows")

    async def answer(_: Request) -> Response:
        pieces = BodyLength(length), b"a", b"b"
        return StreamedAnswer((), lambda: iter(pieces), "text/x", run, pause, is_long=False)

    async with (
        serving(Starlette(routes=[Route("/", answer)])) as url,
        httpx.AsyncClient(trust_env=False, verify=False) as client,
    ):
        assert (await client.get(url)).status_code == status
