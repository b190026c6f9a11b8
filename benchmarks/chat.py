"""Chat requests through the router, which records their tokens, and through a gateway, which records nothing.

    python -m benchmarks.chat --gateway-python gateway/bin/python

*whole answers*, *streams*: 64 clients ask the next question of conversations of about 2,000 tokens. Each answer
has 64 tokens. The router renders the template, finds the earlier turns, sends a ``/generate`` with ids, and parses and
records the answer. The other proxies pass the request on to the worker's own ``/v1/chat/completions``. The next chunk
of a stream leaves the worker when the client has read the previous chunk, so that no chunks are merged. *40 tokens/s*:
each stream gets 40 tokens a second, a moderate load. *turns*: the number of tokens that are tokenised in each of 20
turns, and the time of a turn.

The proxy has one core; the worker and the clients share the other, in one process. ``added`` is the time to the first
words, less this time without a proxy. ``exact`` is the share of requests that reached the worker with the ids that were
sampled in earlier turns. In *turns*, it is the share of conversations that go on with the ids of all earlier turns: see
``benchmarks.chat_turns``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from time import monotonic

import anyio
import httpx
import uvloop

from benchmarks.chat_clients import Asked, Talk, chatting
from benchmarks.chat_turns import measure_turns, show_turns
from benchmarks.chat_worker import stand_ins
from benchmarks.options import Options, parse, present
from benchmarks.peers import Peer, Running, gateway, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock, leave_cleanly, require
from benchmarks.recorded import check_all_recorded
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import StandIn, serving_stand_in
from benchmarks.streams import Pace, quantile_us, spread

_CLIENTS = 64
_NEW_TOKENS = 64
_TOKENS_PER_S = 40  # of each stream, under moderate load
_CONVERSATIONS = 128
_TURNS = 5
_OPENING_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 320, 36, 300  # about 2,000 tokens after five turns
_ANSWERS = 32
_SHARE = 1 / 3  # of --seconds, for each measurement
_SETTLING_S = 0.2

_OURS = "router, radix_cache + openai"
_DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class _Scenario:
    name: str
    stream: bool
    columns: Sequence[Column]
    pace: Pace | None = None


_RATES = (
    Column("requests_per_s", "req/s"),
    Column("cpu_us", "us CPU", ratio=True),
    Column("per_core", "req/s of a whole core"),
)
_FIRST = (Column("first_p50_ms", "first p50 ms", 2), Column("first_p99_ms", "p99", 2))
_ADDED = (Column("added_first_p50_ms", "added p50 ms", 2), Column("added_first_p99_ms", "p99", 2))
_CHECKS = (
    Column("proxy_core", "proxy core %"),
    Column("load_core", "load core %"),
    Column(EXACT, "exact %", 1),
    Column("faults", "faults"),
)
_WHOLE = _Scenario(
    f"whole answers, {_CLIENTS} clients",
    stream=False,
    columns=(*_RATES, Column("p50_ms", "p50 ms", 1), Column("p99_ms", "p99", 1), *_CHECKS),
)
_STREAMS = _Scenario(f"streams, {_CLIENTS} clients", stream=True, columns=(*_RATES, *_FIRST, *_CHECKS))
_MODERATE = _Scenario(
    f"{_CLIENTS} streams, {_TOKENS_PER_S} tokens/s each",
    stream=True,
    columns=(Column("requests_per_s", "req/s"), *_FIRST, *_ADDED, *_CHECKS),
    pace=spread(_CLIENTS * _TOKENS_PER_S),
)
_SCENARIOS = (_WHOLE, _STREAMS, _MODERATE)


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        samples = Samples(save_tokenizer(directory / "tokenizer", options.vocabulary))
        answers = options.pick(_ANSWERS, tiny=2)
        long, short = (
            [samples.answer(tokens) for _ in range(answers)] for tokens in (_ANSWER_TOKENS, _NEW_TOKENS)
        )
        engine, chats = stand_ins(samples, {_ANSWER_TOKENS: long, _NEW_TOKENS: short}, streamed=short[0])
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(serving_stand_in(engine, chats))
            request = request_body("Are you there?", _NEW_TOKENS)
            peers = _peers(options, directory)
            proxies = await started(stack, peers, worker, directory, request, lambda reply: reply.is_success)
            [ours] = [proxy for proxy in proxies if proxy.name == _OURS]
            asked = Asked(await _held(options, ours.url, samples), {answer.text for answer in short})
            for round_ in range(1, options.rounds + 1):
                targets = [Running(_DIRECT, worker), *proxies]
                await _round(report, options, targets, engine, asked)
                proxies = proxies[1:] + proxies[:1]
                print(f"round {round_} of {options.rounds} done", file=sys.stderr)
            await measure_turns(options, report, ours.url, samples, _NEW_TOKENS)
            await check_all_recorded(report, ours.url)
    for scenario in _SCENARIOS:
        report.show(scenario.name, scenario.columns)
    show_turns(report)
    return report.finish(options)


def _peers(options: Options, directory: Path) -> list[Peer]:
    """Return the peers to measure. ``_OURS`` is always one of them, since the conversations are held through it."""
    template = directory / "chat_template.jinja"
    template.write_text(files("slime_engine").joinpath("chat_template.jinja").read_text())
    known = (*options.tokenizer(directory / "tokenizer"), "--chat-template", str(template))
    plugins = ("--no-default-plugins", "--plugin", "radix_cache", "--plugin", "openai")
    others = [router("router, no plugins", "--no-default-plugins"), gateway(options.gateway_python)]
    return present([router(_OURS, *plugins, *known)], options, ignore_only=True) + present(others, options)


async def _held(options: Options, url: str, samples: Samples) -> list[Talk]:
    """Hold the conversations through the router, and return them, each with a question that has no answer yet."""
    talks: list[Talk] = []
    limit = anyio.Semaphore(16)

    async def converse(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> None:
        async with limit:
            for _ in range(options.pick(_TURNS, tiny=2)):
                body = {"messages": messages, "max_tokens": _ANSWER_TOKENS}
                reply = await client.post("/v1/chat/completions", json=body)
                answer = reply.raise_for_status().json()["choices"][0]["message"]["content"]
                question = samples.words(_QUESTION_TOKENS)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": question},
                ]
            talks.append(Talk(messages, _NEW_TOKENS))

    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(options.pick(_CONVERSATIONS, tiny=8)):
            system, question = (samples.words(_OPENING_TOKENS // 2) for _ in range(2))
            opening = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            tasks.start_soon(converse, client, opening)
    return talks


async def _round(
    report: Report, options: Options, targets: Sequence[Running], engine: StandIn, asked: Asked
) -> None:
    """Measure each target in each scenario. The first target is the worker; scenarios without a pace skip it."""
    for scenario in _SCENARIOS:
        direct: dict[str, float] = {}
        for target in targets if scenario.pace else targets[1:]:
            figures = await _measure(target, engine, asked, scenario, options)
            direct = direct or figures
            for figure in ("first_p50_ms", "first_p99_ms"):
                figures[f"added_{figure}"] = figures[figure] - direct[figure]
            report.add(scenario.name, target.name, **figures)


async def _measure(
    target: Running, engine: StandIn, asked: Asked, scenario: _Scenario, options: Options
) -> dict[str, float]:
    seconds = options.seconds * options.pick(_SHARE, tiny=1)
    clients = options.pick(_CLIENTS, tiny=8)
    chats = chatting(target.url, engine, asked, clients=clients, stream=scenario.stream, pace=scenario.pace)
    async with chats as seen:
        await anyio.sleep(options.pick(_SETTLING_S, tiny=0.05))
        gc.collect()
        seen.clear()
        engine.reset_counts()
        cores, cpu_s, began = CoreClock(), target.cpu_s(), monotonic()
        await anyio.sleep(seconds)
        elapsed_s, cpu_s, busy = monotonic() - began, target.cpu_s() - cpu_s, cores.busy()
        answered = seen.chunks / _NEW_TOKENS if scenario.stream else len(seen.took_ns)
        figures = {
            "requests_per_s": answered / elapsed_s,
            "p50_ms": quantile_us(seen.took_ns, 0.5) / 1e3,
            "p99_ms": quantile_us(seen.took_ns, 0.99) / 1e3,
            "first_p50_ms": quantile_us(seen.first_ns, 0.5) / 1e3,
            "first_p99_ms": quantile_us(seen.first_ns, 0.99) / 1e3,
            "proxy_core": busy[PROXY_CORE] * 100,
            "load_core": busy.get(LOAD_CORE, 1.0) * 100,
            "faults": float(seen.faults),
        }
        if cpu_s and answered:
            figures |= {"cpu_us": cpu_s / answered * 1e6, "per_core": answered / cpu_s}
        if target.name == _OURS and engine.requests:
            figures[EXACT] = engine.with_sampled_ids / engine.requests * 100
    return figures


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for a delay of the proxy
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
