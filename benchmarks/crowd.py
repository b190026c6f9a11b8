"""A thousand conversations at once, each compared with the engine's journal token by token."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic_ns
from typing import Any

import anyio
import httpx
import orjson
from tokenizers import Tokenizer

from benchmarks.engine import save_engine_tokenizer, serving_engine
from benchmarks.options import Options
from benchmarks.peers import Running, router, started
from benchmarks.pulse import COLUMNS, feel
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body
from benchmarks.streams import quantile_us
from slime_demo.conversations import Conversation
from slime_demo.verdict import Verdict, judge

__all__ = ["Crowd", "compare", "measure_crowd", "show_crowd"]

_CONVERSATIONS = 1000
_TURNS = 4
_STREAMED = 4  # every fourth
_SYSTEM_TOKENS, _QUESTION_TOKENS = 200, 30
_NEW_TOKENS = range(8, 57)  # different lengths, since else the engine ends all answers in the same moment
_READERS = 16
_SCENARIO = f"{_CONVERSATIONS:,} conversations at once"

_COLUMNS = (
    Column("finished", "finished"),
    Column("errors", "errors"),
    Column("exact_conversations", "exact"),
    Column("corrupted", "corrupted if tokenised again"),
    Column("turns", "turns"),
    Column("tokens", "tokens"),
    Column("hit_rate", "hit rate %"),
    Column("times", "times fewer tokenised", 1),
    Column("turns_per_s", "turns/s"),
    Column("cpu_us", "us CPU"),
    Column("p50_ms", "p50 ms"),
    Column("p99_ms", "p99 ms"),
)


async def measure_crowd(options: Options, report: Report, directory: Path) -> None:
    """Hold all conversations at once. Then retrieve each conversation, and compare it with the engine's journal."""
    tokenizer = save_engine_tokenizer(directory / "engine-tokenizer")
    flags = ("--plugin", "radix_cache", *options.tokenizer(directory / "engine-tokenizer"))
    peer = router(
        "router, radix_cache", "--no-default-plugins", *flags, "--middleware-paths", "benchmarks.pulse"
    )
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            serving_engine(directory, "--max-running-requests", str(_CONVERSATIONS))
        )
        request = request_body("Are you there?", 1)
        [proxy] = await started(stack, [peer], worker, directory, request, lambda reply: reply.is_success)
        report.add(_SCENARIO, proxy.name, **await _measure(options, report, proxy, worker, tokenizer))


def show_crowd(report: Report) -> None:
    report.show(_SCENARIO, _COLUMNS)
    report.show(_SCENARIO, COLUMNS)


async def _measure(
    options: Options, report: Report, proxy: Running, worker: str, tokenizer: Tokenizer
) -> dict[str, float]:
    conversations = options.pick(_CONVERSATIONS, tiny=8)
    crowd = Crowd(proxy.url, Samples(tokenizer), conversations)
    async with feel(proxy) as felt:
        await crowd.converse()
    verdict, stats = await compare(crowd, worker, tokenizer)
    for session, reason in verdict.wrong.items():
        report.problem(f"{session}: {reason}")
    return {
        "finished": crowd.finished,
        "errors": crowd.errors,
        "exact_conversations": verdict.exact,
        EXACT: verdict.exact / conversations * 100,
        "corrupted": verdict.corrupted,
        "turns": verdict.turns,
        "tokens": verdict.tokens,
        "hit_rate": stats["hit_rate"] * 100,
        "times": verdict.naive_tokens / stats["tokenizer"]["tokens_encoded"],
        "turns_per_s": verdict.turns / felt.seconds,
        "cpu_us": felt.own * felt.seconds / max(1, len(crowd.latencies_ns)) * 1e6,
        "p50_ms": quantile_us(crowd.latencies_ns, 0.5) / 1e3,
        "p99_ms": quantile_us(crowd.latencies_ns, 0.99) / 1e3,
        **felt.figures(),
    }


class Crowd:
    """Clients, one for each conversation, each with a connection of its own. Every fourth client reads streams.

    ``question_tokens``: tokens of each first question. ``latencies_ns``: the time of each turn. ``retrievals_ns``: the
    time of each retrieval by :func:`compare`.
    """

    def __init__(
        self,
        url: str,
        samples: Samples,
        conversations: int,
        *,
        question_tokens: int = _QUESTION_TOKENS,
    ) -> None:
        self.finished = self.errors = 0
        self.latencies_ns: list[int] = []
        self.retrievals_ns: list[int] = []
        self.url = url
        system = f"<|im_start|>system\n{samples.words(_SYSTEM_TOKENS)}<|im_end|>\n"
        self.conversations = [
            Conversation(
                session=f"conversation{number}",
                text=system + samples.question(samples.words(question_tokens)),
                streamed=number % _STREAMED == 0,
            )
            for number in range(conversations)
        ]
        self._questions = [samples.words(_QUESTION_TOKENS) for _ in range(conversations)]

    async def converse(self) -> None:
        """Hold all conversations."""
        async with anyio.create_task_group() as tasks:
            for number, conversation in enumerate(self.conversations):
                tasks.start_soon(self._play, number, conversation)

    async def _play(self, number: int, conversation: Conversation) -> None:
        # With verify=False a transport does not read the system's certificates. Reading them takes time.
        transport = httpx.AsyncHTTPTransport(verify=False)
        async with httpx.AsyncClient(
            base_url=self.url, transport=transport, trust_env=False, timeout=120
        ) as client:
            try:
                for turn in range(_TURNS):
                    if turn:
                        conversation.add_message(self._questions[(number + turn) % len(self._questions)])
                    limit = _NEW_TOKENS[(number + 7 * turn) % len(_NEW_TOKENS)]
                    began = monotonic_ns()
                    conversation.add_answer(await _ask(client, conversation, limit))
                    self.latencies_ns.append(monotonic_ns() - began)
                self.finished += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.errors += 1
                print(f"{conversation.session}: {type(error).__name__} {error}")


async def _ask(client: httpx.AsyncClient, conversation: Conversation, max_new_tokens: int) -> str:
    body = {
        "text": conversation.text,
        "rid": conversation.begin_turn(),
        "stream": conversation.streamed,
        "sampling_params": {"max_new_tokens": max_new_tokens},
    }
    headers = {"x-session-id": conversation.session, "content-type": "application/json"}
    reply = await client.post("/generate", content=orjson.dumps(body), headers=headers)
    content = reply.raise_for_status().content
    if conversation.streamed:
        *_, content, done, _ = content.split(b"\n\n")  # cumulative: the last event has the whole answer
        if done != b"data: [DONE]":
            raise ValueError(f"a stream without an end: {done!r}")
        content = content.removeprefix(b"data: ")
    return str(orjson.loads(content)["text"])


async def compare(
    crowd: Crowd, worker: str, tokenizer: Tokenizer, readers: int = _READERS
) -> tuple[Verdict, dict[str, Any]]:
    """Compare the retrieval of each conversation with the tokens that the engine consumed and sampled.

    Returns the comparison and the router's ``/cache_stats``. ``readers``: number of retrievals at the same time.
    """
    conversations, url = crowd.conversations, crowd.url
    retrieved: dict[str, dict[str, Any]] = {}
    waiting = iter(conversations)

    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:

        async def read() -> None:
            for one in waiting:  # all readers share the iterator, so each conversation is read once
                asked = {"text": one.text, "session_id": one.session}
                began = monotonic_ns()
                reply = await client.post(f"{url}/retrieve_from_text", json=asked)
                crowd.retrievals_ns.append(monotonic_ns() - began)
                retrieved[one.session] = orjson.loads(reply.raise_for_status().content)

        async with anyio.create_task_group() as tasks:
            for _ in range(readers):
                tasks.start_soon(read)
        journal = orjson.loads((await client.get(f"{worker}/journal")).raise_for_status().content)
        stats = (await client.get(f"{url}/cache_stats")).raise_for_status().json()
    verdict = judge(
        conversations,
        retrieved,
        {entry["rid"]: entry for entry in journal["entries"]},
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        decode=lambda ids: str(tokenizer.decode(ids)),
    )
    return verdict, stats
