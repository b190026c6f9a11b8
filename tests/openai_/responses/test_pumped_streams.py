"""Chunks of a chat that are made when their events come, without waking the request's task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from starlette.responses import StreamingResponse

from deadlines import HANG_S
from radix_cache.capture.coded import watch_json
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
        told = cumulative(client, IDS)
        self.events = [b"data: %b\n\n" % orjson.dumps(one) for one in told]
        return [one["text"] for one in told]

    def tell_several(self, client: Client, *sequences: list[int], **more: Any) -> list[str]:
        """Make the events of cumulative sequences, which come in turn; return the text of each sequence.

        ``more``: members of the events behind the number of the sequence.
        """
        told = [cumulative(client, ids) for ids in sequences]
        self.events = [
            b"data: %b\n\n" % orjson.dumps(one | {"index": index, **more})
            for together in zip(*told, strict=True)
            for index, one in enumerate(together)
        ]
        return [one[-1]["text"] for one in told]

    async def _stream(self) -> AsyncIterator[bytes]:
        for event in self.events:
            yield event
            await self._steps.acquire()
        yield b"data: [DONE]\n\n"


def cumulative(client: Client, ids: list[int]) -> list[dict[str, Any]]:
    """Return cumulative events, one for each of ``ids``."""
    told = [output(client, ids[:size]) for size in range(1, len(ids) + 1)]
    for one in told[:-1]:
        one["meta_info"]["finish_reason"] = None
    return told


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


def words_in(chunks: list[dict[str, Any] | None], index: int = 0) -> str:
    choices = [choice for one in chunks if one for choice in one["choices"]]
    return "".join(one["delta"].get("content", "") for one in choices if one["index"] == index)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list of what the task of the request reads from now on."""
    made: list[bytes] = []
    read = AnswerStream.read

    async def counted(self: AnswerStream) -> bytes:
        made.append(await read(self))
        return made[-1]

    monkeypatch.setattr(AnswerStream, "read", counted)
    return made


async def test_events_that_only_add_text_wake_no_task(
    start: Start, engine: ScriptedEngine, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, made = SteppedEngine(engine), count_reads(monkeypatch)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        chunks = await heard(client, stepped)
        assert words_in(chunks) == texts[-1]
        assert sum(b'"content"' in piece for piece in made) < len(IDS) - 3
        (record,) = await client.records("a")
        assert (record["exact"], record["tokens"][-len(IDS) :]) == (True, IDS)


async def test_events_of_several_sequences_that_only_add_text_wake_no_task(
    start: Start, engine: ScriptedEngine, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [IDS, IDS[::-1], [IDS[0], *IDS[:-1]]]
    stepped, made = SteppedEngine(engine), count_reads(monkeypatch)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell_several(client, *sequences)
        chunks = await heard(client, stepped, n=len(sequences))
        assert [words_in(chunks, index) for index in range(len(sequences))] == texts
        assert sum(b'"content"' in piece for piece in made) < len(sequences) * (len(IDS) - 3)
        leaves = await client.records("a")
        assert [one["exact"] for one in leaves] == [True] * len(sequences)
        assert {tuple(one["tokens"][-len(IDS) :]) for one in leaves} == set(map(tuple, sequences))


@pytest.mark.parametrize("copies", [1, 3])
async def test_each_event_is_parsed_once_or_not_at_all(
    start: Start, engine: ScriptedEngine, checkpoint: str, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """The recorder reads first. Without an end of a sequence before, it parses the first two events and the last."""
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client) if copies == 1 else stepped.tell_several(client, *[IDS] * copies)
        seen = watch_json(monkeypatch, larger_than=0)
        chunks = await heard(client, stepped, n=copies)
        monkeypatch.undo()
        assert words_in(chunks, copies - 1) == texts[-1]
        parsed = [one.value for one in seen if one.how == "parsed" and isinstance(one.value, dict)]
        events = [one for one in parsed if "output_ids" in one]
        assert [len(one["output_ids"]) for one in events] == [
            count for count in (1, 2, len(IDS)) for _ in range(copies)
        ]
        assert all(one["exact"] for one in await client.records("a"))


async def test_chat_that_wants_ids_and_logprobs_gets_those_of_each_event(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        chunks = await heard(client, stepped, logprobs=True, return_token_ids=True)
        choices = [choice for one in chunks if one for choice in one["choices"]]
        assert words_in(chunks) == texts[-1]
        assert [id for one in choices for id in one.get("token_ids", ())] == IDS
        entries = [entry for one in choices for entry in (one["logprobs"] or {"content": ()})["content"]]
        assert len(entries) == len(IDS)


async def test_sequences_are_told_apart_wherever_their_number_stands(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    """Until its last event, each sequence repeats the text of the sequence before."""
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell_several(client, IDS, [*IDS[:-1], 400], [*IDS[:-1], 401], behind=1)
        chunks = await heard(client, stepped, n=3)
        assert [words_in(chunks, index) for index in range(3)] == texts
        assert [one["exact"] for one in await client.records("a")] == [True] * 3


@pytest.mark.parametrize("index", [1, 7])
async def test_event_of_an_unknown_sequence_ends_the_stream_with_an_error(
    start: Start, engine: ScriptedEngine, checkpoint: str, index: int
) -> None:
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        texts = stepped.tell(client)
        stepped.events[5] = stepped.events[5].replace(b"}}\n\n", b'},"index":%d}\n\n' % index)
        *before, error, end = await heard(client, stepped)
        assert words_in(before) == texts[4]
        assert error is not None
        assert error["error"]["message"] == "the engine's answer was not understood"
        assert end is None


async def test_event_behind_the_end_of_a_sequence_adds_no_text(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    stepped = SteppedEngine(engine)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        text = stepped.tell(client)[-1]
        behind = output(client, [*IDS, 308])
        behind["meta_info"]["finish_reason"] = None
        stepped.events.append(b"data: %b\n\n" % orjson.dumps(behind))
        for _ in stepped.events:
            stepped.step()
        body = {"prompt": "hello", "stream": True, "session_id": "a"}
        answer = await client.running.client.post("/v1/completions", json=body)
        *chunks, end, _ = answer.text.split("\n\n")
        told = [orjson.loads(one.removeprefix("data: "))["choices"][0] for one in chunks]
        assert "".join(one["text"] for one in told) == text
        assert (told[-1]["finish_reason"], end) == ("length", "data: [DONE]")
        assert [one["exact"] for one in await client.records("a")] == [False]


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
