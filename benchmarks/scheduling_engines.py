"""The check of the simulation of ``benchmarks.scheduling``: the same clients, policies and costs with real processes.

Four embedded engines with simulated KV caches and prefill times, each policy in a router of its own, and the gateway
itself. The hit rates have to agree within 0.1, and the order of the policies by hit rate too.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

import anyio
import httpx
import orjson

from benchmarks.engine import serving_engine
from benchmarks.options import Options, parse
from benchmarks.peers import Peer, gateway, router
from benchmarks.processes import PROXY_CORE, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.gateway import GatewayCacheAware
from benchmarks.simulated.outcomes import Makers, add_outcome
from benchmarks.simulated.prompts import BLOCK, Text
from benchmarks.simulated.workloads import Turn, Workload, conversation, length
from slime_policies import CacheAware, RoundRobin, Settings
from slime_policies.plugin import POLICIES

_ENGINES = 4
_TOKENS_PER_S = 40.0
#: An embedded engine prefills a whole batch at once, and its steps do not take longer with more requests.
_COSTS = Costs(chunk=1 << 20, step_s=1 / _TOKENS_PER_S, per_running_s=0.0, running=256, cache=64_000)
_FLAGS = (
    *("--kv-cache-tokens", str(_COSTS.cache), "--page-size", str(BLOCK)),
    *("--prefill-tokens-per-second", str(_COSTS.prefill_per_s), "--tokens-per-second", str(_TOKENS_PER_S)),
)
_START_DEADLINE_S = 30.0
#: Ids of the engine's vocabulary that are ordinary tokens.
_IDS = range(300, 1200)
_NEAR = 0.1

_SIMULATED: Makers = {
    "round_robin": lambda clock: RoundRobin(),
    "least_inflight": lambda clock: POLICIES["least_inflight"](Settings()),
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
    "gateway's cache_aware": lambda clock: GatewayCacheAware(),
}


def _agents(rng: random.Random) -> list[list[Turn]]:
    system = Text().then(4000)
    return [conversation(rng, system.then(length(rng, 150)), 24, 100) for _ in range(60)]


def _multi_turn(rng: random.Random) -> list[list[Turn]]:
    return [conversation(rng, Text().then(length(rng, 600)), 24, 200) for _ in range(80)]


def _grpo(rng: random.Random, groups: int = 24) -> list[list[Turn]]:
    prompts = [Text().then(length(rng, 1500)) for _ in range(groups)]
    return [[Turn(prompt, 0, length(rng, 40))] for prompt in prompts for _ in range(8)]


_WORKLOADS = (
    Workload("agents, 4,000-token system prompt, 24", 24, 1, _agents),
    Workload("multi-turn, 32", 32, 1, _multi_turn),
    Workload("GRPO 24 x 8, 64", 64, 1, _grpo),
)
_TINY = Workload("GRPO 2 x 8, 16", 16, 1, lambda rng: _grpo(rng, 2))


class _Clients:
    """The clients of one workload, who send token ids to ``url``."""

    def __init__(self, url: str, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._conversations = iter(workload.make(random.Random(seed)))
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=300)
        self._parts: dict[int, list[int]] = {}
        self.ttft_s: list[float] = []
        self.cached = self.tokens = 0

    async def run(self) -> float:
        """Send everything. Returns the time that it took, in seconds."""
        begun = anyio.current_time()
        async with self._client, anyio.create_task_group() as tasks:
            for _ in range(self._workload.concurrent):
                tasks.start_soon(self._hold_conversations)
        return anyio.current_time() - begun

    async def _hold_conversations(self) -> None:
        for turns in self._conversations:
            ids: list[int] = []
            for turn in turns:
                await anyio.sleep(turn.think_s)
                ids = self._ids(turn.prompt.parts) if turn.prompt else [*ids, *_random_ids(turn.added)]
                ids = [*ids, *await self._generate(ids, turn.new_tokens)]

    def _ids(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return [one for number, tokens in parts for one in self._part(number, tokens)]

    def _part(self, number: int, tokens: int) -> list[int]:
        if number not in self._parts:
            self._parts[number] = _random_ids(tokens)
        return self._parts[number]

    async def _generate(self, ids: list[int], new_tokens: int) -> list[int]:
        params = {"max_new_tokens": new_tokens, "ignore_eos": True}
        body = orjson.dumps({"input_ids": ids, "sampling_params": params, "stream": True})
        sent, first, last = anyio.current_time(), 0.0, b""
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/generate", content=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or anyio.current_time()
                    last = line.encode()
        told = orjson.loads(last.removeprefix(b"data: "))
        self.ttft_s.append(first - sent)
        self.cached += told["meta_info"]["cached_tokens"]
        self.tokens += len(ids)
        output: list[int] = told["output_ids"]
        return output


def _random_ids(count: int) -> list[int]:
    return random.choices(_IDS, k=count)


def _peers(options: Options) -> Iterator[tuple[str, Peer]]:
    for name in options.pick(("round_robin", "least_inflight", "cache_aware"), tiny=("cache_aware",)):
        yield name, router(name, "--policy", name)
    peer = gateway(options.gateway_python)
    if peer.missing() is None and not options.tiny:
        yield "gateway's cache_aware", peer


async def _measure(
    report: Report,
    workload: Workload,
    name: str,
    peer: Peer,
    engines: Sequence[str],
    seed: int,
    directory: Path,
) -> None:
    port = free_port()
    command = list(peer.command(port, engines[0], directory))
    at = command.index(engines[0]) + 1
    command[at:at] = engines[1:]
    if not peer.is_ours:
        command[command.index("--policy") + 1] = "cache_aware"
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(trust_env=False) as client:
        for engine in engines:
            (await client.post(f"{engine}/flush_cache")).raise_for_status()
        with child(name, command, core=PROXY_CORE, directory=directory) as proxy:
            with anyio.fail_after(_START_DEADLINE_S):
                while not await _is_ready(client, url):
                    if proxy.process.poll() is not None:
                        raise RuntimeError(f"{name} does not start: {proxy.last_words()}")
                    await anyio.sleep(0.2)
            clients = _Clients(url, workload, seed)
            took = await clients.run()
    report.add(
        f"{workload.name}: engines",
        name,
        hit=clients.cached / clients.tokens,
        ttft_ms=quantiles(clients.ttft_s, n=20)[-1] * 1000,
        makespan_s=took,
    )


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    body = {"input_ids": [*_IDS[:4]], "sampling_params": {"max_new_tokens": 1}}
    try:
        return (await client.post(f"{url}/generate", json=body)).is_success
    except httpx.TransportError:
        return False


def _compare(report: Report, workload: Workload) -> None:
    """Note a problem where the simulation and the engines disagree."""
    real, simulated = (report.samples[f"{workload.name}: {kind}"] for kind in ("engines", "simulation"))
    hits = {
        name: tuple(median(sample["hit"] for sample in of[name]) for of in (real, simulated)) for name in real
    }
    for name, (found, expected) in hits.items():
        if abs(found - expected) > _NEAR:
            report.problem(f"{workload.name}: {name}: hit rate {found:.2f}, simulated {expected:.2f}")
    for one, two in combinations(hits, 2):
        (found_one, expected_one), (found_two, expected_two) = hits[one], hits[two]
        if abs(expected_one - expected_two) > _NEAR and (found_one < found_two) != (
            expected_one < expected_two
        ):
            report.problem(f"{workload.name}: the hit rates of {one} and {two} are in another order")


async def _run(options: Options, report: Report, directory: Path) -> None:
    columns = (
        Column("hit", "hit rate", 2),
        Column("ttft_ms", "TTFT p95 ms"),
        Column("makespan_s", "makespan s", 1),
    )
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(serving_engine(directory, *_FLAGS))
            for _ in range(options.pick(_ENGINES, tiny=1))
        ]
        for workload in options.pick(_WORKLOADS, tiny=(_TINY,)):
            if not options.wants(workload.name):
                continue
            for seed in range(options.rounds):
                for name, peer in _peers(options):
                    table = f"{workload.name}: simulation"
                    add_outcome(
                        report, table, _SIMULATED, name, workload, seed, engines=_ENGINES, costs=_COSTS
                    )
                    await _measure(report, workload, name, peer, engines, seed, directory)
            for kind in ("simulation", "engines"):
                report.show(f"{workload.name}: {kind}", columns)
            if not options.tiny:
                _compare(report, workload)


def main() -> int:
    options = parse(__doc__ or "", rounds=1)
    require("taskset", "setpriv")
    leave_cleanly()
    report = Report()
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(_run, options, report, Path(directory))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
