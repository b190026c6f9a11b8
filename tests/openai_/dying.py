"""A worker that dies within its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from slime_testing import FakeEngine

__all__ = ["PATHS", "asked_at", "die_after", "text_of_stream", "until_broken"]

#: The paths of generations, and the bodies of streamed requests to them.
PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


def die_after(engine: FakeEngine, events: int) -> None:
    """Let ``engine`` break each connection after so many ``events`` of a stream."""
    whole = engine._stream
    engine.events_sent = events

    async def broken(outputs: list[dict[str, Any]], hold: anyio.Event | None) -> AsyncIterator[bytes]:
        async for piece in whole(outputs, hold):
            yield piece
        raise ConnectionError("the worker is killed")

    engine._stream = broken  # type: ignore[method-assign]  # breaks off within its answer


def asked_at(path: str, **body: Any) -> dict[str, Any]:
    """Return the body of a streamed request."""
    return {**PATHS[path], "stream": True, **body}


async def until_broken(pieces: AsyncIterator[str]) -> str:
    """Return what comes of a stream that breaks off."""
    got: list[str] = []
    with pytest.raises(httpx.RemoteProtocolError):
        await _collect(pieces, got)
    return "".join(got)


async def text_of_stream(client: httpx.AsyncClient, path: str, session: str = "s", **body: Any) -> str:
    """Return a stream that a worker breaks off; an OpenAI stream then ends with an error event."""
    headers = {"x-session-id": session}
    async with client.stream("POST", path, json=asked_at(path, **body), headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        if path == "/generate":
            return await until_broken(answer.aiter_text())
        got: list[str] = []
        await _collect(answer.aiter_text(), got)
        return "".join(got)


async def _collect(pieces: AsyncIterator[str], got: list[str]) -> None:
    async for piece in pieces:
        got.append(piece)
