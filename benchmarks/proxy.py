"""Requests per second of one core: the router beside the gateway, nginx and a Starlette + httpx proxy.

    python -m benchmarks.proxy --gateway-python gateway/bin/python

*bare*: a 720-byte ``/generate``, and a 3.4 kB answer from nginx as the worker. *conversations*: each request is the
text of a recorded conversation of about 2,000 tokens with a new question, and its answer has 64 tokens with logprobs.
Here the radix cache looks up the text, tokenises what is new, rewrites the request, and records the answer. The other
peers only pass the bytes on.

The proxy has one core, the load generator and the worker the other. ``us CPU`` is the proxy's own processor time per
request, which other processes hardly change. The load of the cores shows which of them was the limit. If the proxy's
own share is below its core's load, other processes ran on this core. ``exact`` is the share of requests that reached
the worker with the sampled ids of earlier turns. Only the radix cache can achieve this.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import uvloop

from benchmarks import nginx, wrk
from benchmarks.options import Options, parse, present
from benchmarks.peers import Running, gateway, httpx_proxy, nginx_proxy, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock, child, free_port, leave_cleanly, require
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import FACTS, StandIn, Template, serving_stand_in

_CONNECTIONS = (64, 256)
_REQUEST_BYTES = 720
_BARE_TOKENS = 82  # 3.4 kB of answer
_NEW_TOKENS = 64
_CONVERSATIONS = 128
_TURNS = 5
_OPENING_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 320, 36, 300  # about 2,000 tokens after five turns
_ANSWERS = 32
_WARM_UP_S = 1.0
_SETTLING_S = 0.25
_DRAINING_S = 10.0
_IDLE_CPU = 0.05  # of one core: timers and probes, no requests

_EXACT_ROUTER = "router, radix_cache"
_KEEPING_IT_RUNNING = ("--plugin", "health", "--plugin", "control", "--plugin", "retries")
_COLUMNS = (
    Column("requests_per_s", "req/s", ratio=True),
    Column("cpu_us", "us CPU", 1, ratio=True),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1),
    Column("proxy_own", "proxy's own %"),
    Column("proxy_core", "proxy core %"),
    Column("load_core", "load core %"),
    Column("errors", "errors"),
)


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        tokenizer = save_tokenizer(directory / "tokenizer", options.vocabulary)
        samples = Samples(tokenizer)
        await _bare(options, report, samples, directory)
        await _conversations(options, report, samples, directory)
    for connections in _CONNECTIONS:
        report.show(f"bare, {connections} connections", _COLUMNS)
    for connections in _CONNECTIONS:
        report.show(f"conversations, {connections} connections", (*_COLUMNS, Column(EXACT, "exact %", 1)))
    return report.finish(options)


async def _bare(options: Options, report: Report, samples: Samples, directory: Path) -> None:
    peers = present(
        [
            router("router, no plugins", "--no-default-plugins"),
            router(
                "router, health control retries", "--no-default-plugins", *_KEEPING_IT_RUNNING, tiny=False
            ),
            router("router, default plugins", tiny=False),
            gateway(options.gateway_python),
            nginx_proxy(),
            httpx_proxy(),
        ],
        options,
    )
    template = Template(samples.answer(_BARE_TOKENS).payload)
    text = samples.opening(100)
    while len(request := request_body(text, _BARE_TOKENS)) > _REQUEST_BYTES:
        text = text[:-1]
    bodies = directory / "bare.jsonl"
    bodies.write_bytes(request)
    answer = template.render(b"0", 100)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(_cheapest_worker(template, answer, directory))
        proxies = await started(stack, peers, worker, directory, request, _is_complete)
        await _rounds(options, report, "bare", dict.fromkeys(proxies, bodies))


@asynccontextmanager
async def _cheapest_worker(template: Template, answer: bytes, directory: Path) -> AsyncIterator[str]:
    """Run a worker that takes little of the load's core: nginx, or a Python stand-in if nginx is not installed."""
    if not nginx.is_installed():
        print(
            f"{nginx.MISSING}: the worker is a Python stand-in, which a fast proxy can outrun",
            file=sys.stderr,
        )
        async with serving_stand_in(StandIn({_BARE_TOKENS: [template]})) as url:
            yield url
        return
    port = free_port()
    with child(
        "worker", nginx.worker_command(port, answer, FACTS, directory), core=LOAD_CORE, directory=directory
    ):
        yield f"http://127.0.0.1:{port}"


async def _conversations(options: Options, report: Report, samples: Samples, directory: Path) -> None:
    flags = ("--plugin", "radix_cache", *options.tokenizer(directory / "tokenizer"))
    peers = present(
        [
            router(_EXACT_ROUTER, "--no-default-plugins", *flags),
            router("router, no plugins", "--no-default-plugins", tiny=False),
            gateway(options.gateway_python),
            nginx_proxy(),
            httpx_proxy(),
        ],
        options,
    )
    answers = {
        length: [Template(samples.answer(length).payload) for _ in range(options.pick(_ANSWERS, tiny=2))]
        for length in (_ANSWER_TOKENS, _NEW_TOKENS)
    }
    stand_in = StandIn(answers, sampled_before=samples.spelled_ids)
    request = request_body(samples.opening(_OPENING_TOKENS), _NEW_TOKENS)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(serving_stand_in(stand_in))
        bodies = {}
        for proxy in await started(stack, peers, worker, directory, request, _is_complete):
            bodies[proxy] = directory / f"{proxy.name}.jsonl"
            bodies[proxy].write_bytes(b"\n".join(await _recorded(options, proxy, samples)))
        await _rounds(options, report, "conversations", bodies, stand_in)


async def _recorded(options: Options, proxy: Running, samples: Samples) -> list[bytes]:
    """Hold the conversations through ``proxy``. Return requests for the next turns, with ``wrk.UNIQUE`` in each."""
    requests: list[bytes] = []
    limit = anyio.Semaphore(16)

    async def converse(client: httpx.AsyncClient, text: str, questions: Sequence[str]) -> None:
        async with limit:
            for question in questions:
                reply = await client.post("/generate", content=request_body(text, _ANSWER_TOKENS))
                reply.raise_for_status()
                text = samples.following(text, reply.json()["text"], question)
            requests.append(request_body(text, _NEW_TOKENS))

    headers = {"content-type": "application/json"}
    async with (
        httpx.AsyncClient(base_url=proxy.url, headers=headers, trust_env=False, timeout=60) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(options.pick(_CONVERSATIONS, tiny=4)):
            questions = [samples.words(_QUESTION_TOKENS) for _ in range(options.pick(_TURNS, tiny=2))]
            questions[-1] += f" {wrk.UNIQUE}"
            tasks.start_soon(converse, client, samples.opening(_OPENING_TOKENS), questions)
    return requests


async def _rounds(
    options: Options,
    report: Report,
    scenario: str,
    bodies: Mapping[Running, Path],
    stand_in: StandIn | None = None,
) -> None:
    """Measure every proxy in every round, one after another; the order rotates from round to round."""
    proxies = list(bodies)
    for round_ in range(options.pick(0, tiny=1), options.rounds + 1):
        for connections in options.pick(_CONNECTIONS, tiny=_CONNECTIONS[:1]):
            for proxy in proxies:
                seconds = options.seconds if round_ else _WARM_UP_S
                if stand_in is not None:
                    stand_in.reset_counts()
                cores, cpu_s = CoreClock(), proxy.cpu_s()
                seen = await wrk.run(
                    proxy.url,
                    bodies[proxy],
                    connections=connections,
                    seconds=seconds,
                    tag=f"{round_}-{connections}",
                    most_requests=options.most_requests,
                )
                cpu_s, busy = proxy.cpu_s() - cpu_s, cores.busy()
                await _drained(proxy)
                if not round_:
                    continue
                figures = {
                    "requests_per_s": seen.requests / seen.duration_us * 1e6,
                    "cpu_us": cpu_s / max(1, seen.requests) * 1e6,
                    "p50_ms": seen.p50_us / 1e3,
                    "p99_ms": seen.p99_us / 1e3,
                    "proxy_own": cpu_s / seen.duration_us * 1e8,
                    "proxy_core": busy[PROXY_CORE] * 100,
                    "load_core": busy.get(LOAD_CORE, 1.0) * 100,
                    **seen.errors(),
                }
                if stand_in is not None and proxy.name == _EXACT_ROUTER:
                    figures[EXACT] = stand_in.with_sampled_ids / max(1, stand_in.requests) * 100
                report.add(f"{scenario}, {connections} connections", proxy.name, **figures)
        if round_:
            proxies = proxies[1:] + proxies[:1]
        print(f"{scenario}: round {round_} of {options.rounds} done", file=sys.stderr)


async def _drained(proxy: Running) -> None:
    """Wait until ``proxy`` has finished the requests that the load generator gave up, for ten seconds at most.

    A slow proxy works on these requests for seconds, and would slow down the next measurement.
    """
    cpu_s = proxy.cpu_s()
    for _ in range(round(_DRAINING_S / _SETTLING_S)):
        await anyio.sleep(_SETTLING_S)
        before, cpu_s = cpu_s, proxy.cpu_s()
        if cpu_s - before < _IDLE_CPU * _SETTLING_S:
            return


def _is_complete(reply: httpx.Response) -> bool:
    """Return True if the answer has status 200, at least ``_NEW_TOKENS`` tokens, and a logprob for each token."""
    if reply.status_code != 200:
        return False
    answer = json.loads(reply.content)
    return len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) >= _NEW_TOKENS


if __name__ == "__main__":
    require("wrk", "setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
