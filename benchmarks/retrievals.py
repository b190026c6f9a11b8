"""Retrievals over a socket: a router that recorded conversations of 2,000 tokens is asked for their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import msgpack  # type: ignore[import-untyped]  # it has no annotations

from benchmarks import wrk
from benchmarks.options import Options
from benchmarks.peers import Running, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock
from benchmarks.report import Report
from benchmarks.samples import Samples, request_body
from benchmarks.stand_in import StandIn, Template, serving_stand_in

__all__ = ["measure"]

_JSON, _MSGPACK = "application/json", "application/x-msgpack"
_CONVERSATIONS = 128
_TURNS = 5
_OPENING_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 320, 36, 300
_CONNECTIONS = 64
_ANSWERS = 32
_WARM_UP_S = 1.0
_SCRIPT = Path(wrk.__file__).with_name("load.lua")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for the tokens of a whole conversation, as a rollout sends it."""

    text: str
    session: str

    def body(self) -> bytes:
        # Without ``UNIQUE`` the load generator would send the first body only.
        document = {"text": self.text, "session_id": self.session, "nonce": wrk.UNIQUE}
        return json.dumps(document, separators=(",", ":")).encode()


async def measure(options: Options, report: Report, scenario: str, tokenizer: Path, samples: Samples) -> None:
    """Measure retrievals in JSON and in msgpack, alternately, and add the figures to ``report``."""
    answers = [samples.answer(_ANSWER_TOKENS) for _ in range(options.pick(_ANSWERS, tiny=2))]
    templates = {_ANSWER_TOKENS: [Template(answer.payload) for answer in answers]}
    stand_in = StandIn(templates, sampled_before=samples.spelled_ids)
    flags = ("--no-default-plugins", "--plugin", "radix_cache", *options.tokenizer(tokenizer))
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(serving_stand_in(stand_in))
        first = request_body(samples.opening(_OPENING_TOKENS), _ANSWER_TOKENS)
        peers = [router("router, radix_cache", *flags)]
        directory = tokenizer.parent
        for proxy in await started(stack, peers, worker, directory, first, lambda reply: reply.is_success):
            turns = options.pick(_TURNS, tiny=2)
            asked = await _held(proxy, samples, options.pick(_CONVERSATIONS, tiny=4), turns)
            share = await _exact(proxy, asked, samples.spelled_ids, turns)
            bodies = directory / "retrievals.jsonl"
            bodies.write_bytes(b"\n".join(one.body() for one in asked))
            for round_ in range(options.pick(0, tiny=1), options.rounds + 1):
                for name, accept in (("JSON", _JSON), ("msgpack", _MSGPACK)):
                    seconds = options.seconds if round_ else _WARM_UP_S
                    figures = await _load(proxy, bodies, accept, seconds, options.most_requests)
                    if round_:
                        report.add(scenario, name, **figures, exact=share * 100)
                print(f"retrievals: round {round_} of {options.rounds} done", file=sys.stderr)


async def _held(proxy: Running, samples: Samples, conversations: int, turns: int) -> list[_Asked]:
    """Hold conversations through ``proxy``. Return the requests that retrieve the whole conversations."""
    asked: list[_Asked] = []
    limit = anyio.Semaphore(16)

    async def converse(client: httpx.AsyncClient, session: str, text: str, questions: Sequence[str]) -> None:
        async with limit:
            headers = {"content-type": _JSON, "x-session-id": session}
            for number in range(turns):
                body = request_body(text, _ANSWER_TOKENS)
                reply = await client.post("/generate", content=body, headers=headers)
                reply.raise_for_status()
                answer = reply.json()["text"]
                if number < len(questions):
                    text = samples.following(text, answer, questions[number])
            asked.append(_Asked(text + answer, session))

    async with (
        httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as client,
        anyio.create_task_group() as tasks,
    ):
        for number in range(conversations):
            questions = [samples.words(_QUESTION_TOKENS) for _ in range(turns - 1)]
            tasks.start_soon(
                converse, client, f"rollout-{number}", samples.opening(_OPENING_TOKENS), questions
            )
    return asked


async def _exact(proxy: Running, asked: Sequence[_Asked], spelled: Sequence[int], turns: int) -> float:
    """Return the share of ``asked`` that is answered exactly, in both formats, with the ids that were sampled."""
    exact = 0
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as client:
        for one in asked:
            reply = await client.post("/retrieve_from_text", content=one.body())
            packed = await client.post(
                "/retrieve_from_text", content=one.body(), headers={"accept": _MSGPACK}
            )
            said, ids = reply.json(), msgpack.unpackb(packed.content)["tokens"]["data"]
            told = memoryview(ids).cast("i").tolist()
            sampled = sum(told[at : at + len(spelled)] == list(spelled) for at in range(len(told)))
            exact += said["exact"] and said["tokens"] == told and sampled == turns
    return exact / len(asked)


async def _load(
    proxy: Running, bodies: Path, accept: str, seconds: float, most: int | None
) -> dict[str, float]:
    cores, cpu_s = CoreClock(), proxy.cpu_s()
    seen = await wrk.run(
        proxy.url, bodies, connections=_CONNECTIONS, seconds=seconds, tag="1", most_requests=most,
        path="/retrieve_from_text", script=_SCRIPT, headers=(f"Accept: {accept}",),
    )  # fmt: skip
    cpu_s, busy = proxy.cpu_s() - cpu_s, cores.busy()
    per_request = cpu_s / max(1, seen.requests)
    return {
        "requests_per_s": seen.requests / seen.duration_us * 1e6,
        "cpu_us": per_request * 1e6,
        "per_core": 1 / per_request if per_request else 0.0,
        "p50_ms": seen.p50_us / 1e3,
        "p99_ms": seen.p99_us / 1e3,
        "proxy_core": busy[PROXY_CORE] * 100,
        "load_core": busy.get(LOAD_CORE, 1.0) * 100,
        **seen.errors(),
    }
