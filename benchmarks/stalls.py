"""The router's event loop while prompts of 32k tokens pass through the router beside many small streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

import anyio
import httpx
import orjson

from benchmarks.options import Options
from benchmarks.peers import Running, router, started
from benchmarks.pulse import COLUMNS, feel
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import Chunk, StandIn, Stream, Template, serving_stand_in
from benchmarks.streams import cumulative_chunks, quantile_us, streaming

__all__ = ["measure_stalls", "show_stalls"]

_CHUNKS_PER_S = 5_000
_STREAM_TOKENS = 64
_STREAM_PROMPT = "Once upon a time"  # the prompt of the clients in streams.py
_PROMPT_TOKENS, _NEW_TOKENS, _QUESTION_TOKENS = 32_768, 128, 100
_PROMPTS_AT_ONCE = 4
_OPENINGS = 8
_SETTLING_S = 1.0
_APART_S = 0.005
_TICK_S = 0.001
_MOST_AT_ONCE = 50  # chunks
_SCENARIO = "event loop"


@dataclass(frozen=True, slots=True)
class _Load:
    name: str
    streams: int = 0
    prompts: int = 0


_LOADS = (
    _Load("idle"),
    _Load("64 streams", streams=64),
    _Load("64 streams + 32k prompts", streams=64, prompts=_PROMPTS_AT_ONCE),
    _Load("1,000 streams", streams=1000),
    _Load("1,000 streams + 32k prompts", streams=1000, prompts=_PROMPTS_AT_ONCE),
)

_TINY_LOADS = (_Load("idle"), _Load("4 streams + prompts", streams=4, prompts=1))

_COLUMNS = (
    *COLUMNS,
    Column("chunks_per_s", "chunks/s"),
    Column("chunk_p50_ms", "chunk p50 ms", 1),
    Column("chunk_p999_ms", "p99.9", 1),
    Column("faults", "lost"),
    Column("prompts", "prompts"),
    Column("exact_turns", "exact"),
    Column("generate_ms", "generate ms"),
    Column("retrieve_ms", "retrieve ms"),
)


async def measure_stalls(options: Options, report: Report, directory: Path) -> None:
    tokenizer = save_tokenizer(directory / "tokenizer", options.vocabulary)
    samples = Samples(tokenizer)
    answer = samples.answer(_STREAM_TOKENS)
    prompt_tokens = len(tokenizer.encode(_STREAM_PROMPT).ids)  # else the cache finds a contradiction
    chunks = cumulative_chunks(samples, answer, prompt_tokens)
    answers = [Template(samples.answer(_NEW_TOKENS).payload) for _ in range(8)]
    stand_in = StandIn({_NEW_TOKENS: answers}, chunks=chunks)
    openings = [samples.opening(options.pick(_PROMPT_TOKENS, tiny=256)) for _ in range(_OPENINGS)]
    flags = ("--plugin", "radix_cache", *options.tokenizer(directory / "tokenizer"))
    peer = router("router", "--no-default-plugins", *flags, "--middleware-paths", "benchmarks.pulse")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(serving_stand_in(stand_in))
        request = request_body("Are you there?", _NEW_TOKENS)
        [proxy] = await started(stack, [peer], worker, directory, request, lambda reply: reply.is_success)
        long = _LongPrompts(proxy.url, samples, openings)
        for load in options.pick(_LOADS, tiny=_TINY_LOADS):
            figures = await _measure(proxy, stand_in, chunks, long, load, options)
            report.add(_SCENARIO, load.name, **figures)


def show_stalls(report: Report) -> None:
    report.show(_SCENARIO, _COLUMNS)


async def _measure(
    proxy: Running,
    stand_in: StandIn,
    chunks: Sequence[Chunk],
    long: _LongPrompts,
    load: _Load,
    options: Options,
) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        streams = streaming(proxy.url, stand_in, chunks, streams=load.streams, pace=_in_turn)
        seen = await stack.enter_async_context(streams)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for _ in range(load.prompts):
            tasks.start_soon(long.converse)
        await _apart(stand_in)
        await anyio.sleep(options.pick(_SETTLING_S, tiny=0.1))
        seen.clear()
        long.clear()
        async with feel(proxy) as felt:
            await anyio.sleep(options.seconds)
            if load.prompts:  # a short round on a busy machine may end before the first answer
                await long.answered.wait()
        figures = felt.figures()
        if load.streams:
            figures |= {
                "chunks_per_s": len(seen.delays_ns) / felt.seconds,
                "chunk_p50_ms": quantile_us(seen.delays_ns, 0.5) / 1e3,
                "chunk_p999_ms": quantile_us(seen.delays_ns, 0.999) / 1e3,
                "faults": seen.faults,
            }
        if load.prompts:
            figures |= long.figures(felt.seconds)
        tasks.cancel_scope.cancel()
    return figures


async def _in_turn(stand_in: StandIn) -> None:
    """Advance the streams in turn, new ones last, so that they stay apart. If over 50 chunks are due, skip the rest."""
    streams = stand_in.streams
    owed, before = 0.0, monotonic()
    while True:
        await anyio.sleep(_TICK_S)
        now = monotonic()
        owed = min(owed + (now - before) * _CHUNKS_PER_S, _MOST_AT_ONCE)
        before = now
        while owed >= 1 and streams:
            rid = next(iter(streams))
            stream = streams[rid] = streams.pop(rid)
            _advance(stream)
            owed -= 1


async def _apart(stand_in: StandIn) -> None:
    """Give some streams more chunks than others, so that they do not all begin and end in the same moment."""
    for number, stream in enumerate(list(stand_in.streams.values())):
        for _ in range(number % _STREAM_TOKENS):
            _advance(stream)
        await anyio.sleep(_APART_S)


def _advance(stream: Stream) -> None:
    if not stream.transport.is_closing():  # a stream of the previous load may still be closing
        stream.advance()


class _LongPrompts:
    """Conversations of two turns. Each conversation begins with a prompt of its own, of 32k tokens.

    Each turn is generated and retrieved.
    """

    def __init__(self, url: str, samples: Samples, openings: Sequence[str]) -> None:
        self._url = url
        self._samples = samples
        self._openings = openings
        self._numbers = count()
        self.clear()

    def clear(self) -> None:
        self._turns = self._exact = 0
        self.answered = anyio.Event()
        self._generate_ns: list[int] = []
        self._retrieve_ns: list[int] = []

    def figures(self, seconds: float) -> dict[str, float]:
        return {
            "prompts": self._turns,
            "exact_turns": self._exact,
            "turns_per_s": self._turns / seconds,
            EXACT: self._exact / max(1, self._turns) * 100,
            "generate_ms": quantile_us(self._generate_ns, 0.5) / 1e3,
            "retrieve_ms": quantile_us(self._retrieve_ns, 0.5) / 1e3,
        }

    async def converse(self) -> None:
        """Hold one conversation after another, for ever."""
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=60) as client:
            while True:
                number = next(self._numbers)
                text = f"Conversation {number}. {self._openings[number % len(self._openings)]}"
                text = await self._turn(client, number, text)
                question = self._samples.words(_QUESTION_TOKENS)
                await self._turn(client, number, f"{text}<|im_end|>\n{self._samples.question(question)}")

    async def _turn(self, client: httpx.AsyncClient, number: int, text: str) -> str:
        headers = {"x-session-id": f"long{number}", "content-type": "application/json"}
        began = monotonic_ns()
        reply = await client.post("/generate", content=request_body(text, _NEW_TOKENS), headers=headers)
        self._generate_ns.append(monotonic_ns() - began)
        answer: dict[str, Any] = orjson.loads(reply.raise_for_status().content)
        text += answer["text"]
        began = monotonic_ns()
        reply = await client.post(
            "/retrieve_from_text", content=orjson.dumps({"text": text}), headers=headers
        )
        self._retrieve_ns.append(monotonic_ns() - began)
        found: dict[str, Any] = orjson.loads(reply.raise_for_status().content)
        consumed = answer["meta_info"]["prompt_tokens"]
        self._turns += 1
        self._exact += found["exact"] and found["tokens"][consumed:] == answer["output_ids"]
        self.answered.set()
        return text
