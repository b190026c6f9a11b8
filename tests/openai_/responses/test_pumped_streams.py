"""Chunks of a chat that are made when their events come, without waking the request's task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from starlette.responses import StreamingResponse

from deadlines import HANG_S
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.outputs import output
from radix_cache.scripted import Client, ScriptedEngine, routed
from slime_openai.responses.answer_stream import AnswerStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from routers import Start

__all__ = ["checkpoint", "engine", "tokenizer"]

pytestmark = pytest.mark.anyio

IDS = [300, 301, 302, 303, 304, 305, 306, 307]


class SteppedEngine:
    """An engine whose stream sends its next event when :meth:`step` is called."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.events: list[bytes] = []
        self._steps = anyio.Semaphore(0)
        engine.rest = lambda _: StreamingResponse(self._stream(), media_type="text/event-stream")

    def step(self) -> None:
        self._steps.release()

    def tell(self, client: Client) -> list[str]:
        """Make the events of a cumulative stream of IDS; return the text of each."""
        outputs = [output(client, IDS[:size]) for size in range(1, len(IDS) + 1)]
        for one in outputs[:-1]:
            one["meta_info"]["finish_reason"] = None
        self.events = [b"data: %b\n\n" % orjson.dumps(one) for one in outputs]
        return [one["text"] for one in outputs]

    async def _stream(self) -> AsyncIterator[bytes]:
        for event in self.events:
            yield event
            await self._steps.acquire()
        yield b"data: [DONE]\n\n"


async def heard(client: Client, stepped: SteppedEngine, **body: Any) -> list[dict[str, Any] | None]:
    """Return the chunks; each one is read before the next event. None stands for the end."""
    got: list[dict[str, Any] | None] = []
    asked = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "session_id": "a", **body}
    with anyio.fail_after(HANG_S):
        async with client.running.client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            async for piece in answer.aiter_bytes():  # an event may make two chunks, in one piece
                for line in filter(None, piece.decode().splitlines()):
                    got.append(None if line == "data: [DONE]" else orjson.loads(line.removeprefix("data: ")))
                stepped.step()
    for _ in stepped.events:
        stepped.step()  # else the engine would use up its grace period
    return got


def words_in(chunks: list[dict[str, Any] | None]) -> str:
    return "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one and one["choices"])


async def test_events_that_only_add_text_wake_no_task(
    start: Start, engine: ScriptedEngine, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, made = SteppedEngine(engine), []
    read = AnswerStream.read

    async def counted(self: AnswerStream) -> bytes:
        made.append(await read(self))
        return made[-1]

    monkeypatch.setattr(AnswerStream, "read", counted)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        chunks = await heard(client, stepped)
        assert words_in(chunks) == texts[-1]
        assert sum(b'"content"' in piece for piece in made) < len(IDS) - 3
        (record,) = await client.records("a")
        assert (record["exact"], record["tokens"][-len(IDS) :]) == (True, IDS)


async def test_text_that_may_begin_a_stop_string_is_held_back(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        for _ in IDS:
            stepped.step()  # there is no chunk to wait for
        chunks = await heard(client, stepped, stop=[f"{texts[5][len(texts[2]) :]}never"])
        assert words_in(chunks) == texts[-1]


async def test_event_that_cannot_be_read_ends_the_stream_with_an_error(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        known = orjson.dumps(texts[4])[:-1]
        stepped.events[5] = stepped.events[5].replace(known, known + rb"\q")
        chunks = await heard(client, stepped)
        *before, error, end = chunks
        assert words_in(before) == texts[4]
        assert error is not None
        assert error["error"]["message"] == "the engine's answer was not understood"
        assert end is None
