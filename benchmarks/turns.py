"""Figures of each turn: tokens that the radix cache reuses, tokens tokenised with and without the cache, latency."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import httpx
import orjson

from benchmarks.engine import save_engine_tokenizer, serving_engine
from benchmarks.options import Options
from benchmarks.peers import router, started
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body
from benchmarks.streams import quantile_us

__all__ = ["SHAPES", "Shape", "measure_turns", "show_turns"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Conversations; sizes are in tokens. All begin with the same ``system`` prompt, and each has its own ``question``.

    Each turn adds an answer of ``sampled`` tokens, and the next request adds ``asked`` tokens. ``question`` and
    ``asked`` include the template's markup.
    """

    name: str
    system: int
    question: int
    sampled: int
    asked: int
    turns: int
    conversations: int


SHAPES = (
    Shape("chat", system=50, question=50, sampled=25, asked=25, turns=12, conversations=96),
    Shape("agent", system=1000, question=100, sampled=64, asked=448, turns=16, conversations=24),
)

_COLUMNS = (
    Column("prompt", "prompt tokens"),
    Column("hit_rate", "hit rate %"),
    Column("reused", "reused %"),
    Column("tokenised", "tokenised"),
    Column("tokenised_without", "without cache"),
    Column("times", "times fewer", 1),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1),
    Column("without_p50_ms", "without p50", 1),
    Column("without_p99_ms", "without p99", 1),
)
_JSON = {"content-type": "application/json"}
_MARKUP_TOKENS = 10
_WITH, _WITHOUT = "router, radix_cache", "router, no plugins"


async def measure_turns(options: Options, report: Report, directory: Path) -> None:
    """Hold the conversations of every shape through a router with the cache; send the same prompts to one without."""
    samples = Samples(save_engine_tokenizer(directory / "engine-tokenizer"))
    cached = ("--plugin", "radix_cache", *options.tokenizer(directory / "engine-tokenizer"))
    peers = [
        router(_WITH, "--no-default-plugins", *cached),
        router(_WITHOUT, "--no-default-plugins"),
    ]
    for whole in options.pick(SHAPES, tiny=SHAPES[:1]):
        shape = options.pick(whole, tiny=replace(whole, turns=2, conversations=2))
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(serving_engine(directory))
            request = request_body("Are you there?", 1)
            routers = await started(stack, peers, worker, directory, request, lambda reply: reply.is_success)
            with_cache, without = [
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=one.url, trust_env=False, timeout=60)
                )
                for one in routers
            ]
            await _measure(report, shape, samples, with_cache, without)


def show_turns(report: Report) -> None:
    for shape in SHAPES:
        report.show(shape.name, _COLUMNS)


async def _measure(
    report: Report, shape: Shape, samples: Samples, with_cache: httpx.AsyncClient, without: httpx.AsyncClient
) -> None:
    """Send the turns of all conversations, one request at a time, to both routers in alternating order."""
    system = f"<|im_start|>system\n{samples.words(shape.system)}<|im_end|>\n"
    texts = [
        system + samples.question(samples.words(shape.question - _MARKUP_TOKENS))
        for _ in range(shape.conversations)
    ]
    whole = _Sums()
    for number in range(1, shape.turns + 1):
        turn = _Sums()
        before = await _stats(with_cache)
        for place, text in enumerate(texts):
            request = _request(text, shape.sampled)
            if place % 2:
                turn.hear_without(*await _ask(without, request))
            answer, took_ns = await _ask(with_cache, request)
            turn.with_ns.append(took_ns)
            if not place % 2:
                turn.hear_without(*await _ask(without, request))
            question = samples.words(shape.asked - _MARKUP_TOKENS)
            texts[place] = samples.following(text, answer["text"], question)
        turn.count(before, await _stats(with_cache))
        whole.add(turn)
        report.add(shape.name, f"turn {number}", **turn.figures())
    report.add(shape.name, "all turns", **whole.figures())


@dataclass(slots=True)
class _Sums:
    """Sums over some turns, and the time of each turn."""

    with_ns: list[int] = field(default_factory=list)
    without_ns: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def hear_without(self, answer: dict[str, Any], took_ns: int) -> None:
        """Add a turn without the cache: the engine tokenised all of the text, and reports the number of tokens."""
        self.without_ns.append(took_ns)
        self.counts["tokenised_without"] += answer["meta_info"]["prompt_tokens"]

    def count(self, before: Counter[str], after: Counter[str]) -> None:
        self.counts.update(after - before)

    def add(self, other: _Sums) -> None:
        self.with_ns += other.with_ns
        self.without_ns += other.without_ns
        self.counts.update(other.counts)

    def figures(self) -> dict[str, float]:
        counts = self.counts
        return {
            "prompt": counts["tokenised_without"] / len(self.without_ns),
            "hit_rate": counts["hits"] / counts["requests"] * 100,
            "reused": counts["tokens_reused"] / (counts["tokens_reused"] + counts["tokens_encoded"]) * 100,
            "tokenised": counts["tokenised"],
            "tokenised_without": counts["tokenised_without"],
            "times": counts["tokenised_without"] / counts["tokenised"],
            "p50_ms": quantile_us(self.with_ns, 0.5) / 1e3,
            "p99_ms": quantile_us(self.with_ns, 0.99) / 1e3,
            "without_p50_ms": quantile_us(self.without_ns, 0.5) / 1e3,
            "without_p99_ms": quantile_us(self.without_ns, 0.99) / 1e3,
        }


async def _stats(client: httpx.AsyncClient) -> Counter[str]:
    stats = (await client.get("/cache_stats")).raise_for_status().json()
    wanted = ("requests", "hits", "tokens_reused", "tokens_encoded")
    return Counter(
        {name: stats[name] for name in wanted} | {"tokenised": stats["tokenizer"]["tokens_encoded"]}
    )


def _request(text: str, tokens: int) -> dict[str, Any]:
    """Return a request for exactly ``tokens`` tokens, so that the engine has the same work through both routers."""
    return {"text": text, "sampling_params": {"max_new_tokens": tokens, "min_new_tokens": tokens}}


async def _ask(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the answer, and the nanoseconds that it took."""
    body = orjson.dumps(request)
    began = monotonic_ns()
    reply = await client.post("/generate", content=body, headers=_JSON)
    took_ns = monotonic_ns() - began
    answer: dict[str, Any] = orjson.loads(reply.raise_for_status().content)
    return answer, took_ns
