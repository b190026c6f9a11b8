"""The check of the simulation of ``benchmarks.scheduling``: the same clients, policies and costs with real processes.

The processes are four embedded engines with simulated KV caches and prefill times, a router for each policy, and the
gateway itself. Each hit rate must be within 0.1 of the simulated one. If the simulated hit rates of two policies differ
by more than 0.1, the policy with the higher one must also have the higher hit rate with the engines.

The last tables have one engine with four data-parallel ranks, and ``cache_aware`` with ``--dp-aware`` (*on*) and
without (*off*). If the simulated TTFT p95 is shorter with ``--dp-aware`` than without, the engine's must be shorter,
too. If the simulated one is not shorter, the engine's must not be shorter.
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

from benchmarks.engine import serving_engine
from benchmarks.id_clients import IDS, IdClients
from benchmarks.options import Options, parse
from benchmarks.peers import Peer, gateway, router
from benchmarks.processes import PROXY_CORE, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.fleets import Ranks
from benchmarks.simulated.gateway import GatewayCacheAware
from benchmarks.simulated.outcomes import Makers, add_outcome, figures
from benchmarks.simulated.prompts import BLOCK, Text
from benchmarks.simulated.simulation import simulate
from benchmarks.simulated.workloads import Turn, Workload, conversation, length, three_turns
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
_RANKS = 4
#: Rows of the tables of ranks, and the flags of their routers.
_RANK_FLAGS: tuple[tuple[str, tuple[str, ...]], ...] = (("off", ()), ("on", ("--dp-aware",)))
_START_DEADLINE_S = 30.0
_NEAR = 0.1
_KINDS = "engines", "simulation"
_COLUMNS = (
    Column("hit", "hit rate", 2),
    Column("ttft_ms", "TTFT p95 ms"),
    Column("makespan_s", "makespan s", 1),
)

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
_RANK_WORKLOADS = (
    Workload("three turns, 16", 16, 1, lambda rng: three_turns(rng, 24, 24)),
    *_WORKLOADS,
)
_TINY = Workload("GRPO 2 x 8, 16", 16, 1, lambda rng: _grpo(rng, 2))


def _peers(options: Options) -> Iterator[tuple[str, Peer]]:
    for name in options.pick(("round_robin", "least_inflight", "cache_aware"), tiny=("cache_aware",)):
        yield name, router(name, "--policy", name)
    peer = gateway(options.gateway_python)
    if peer.missing() is None and not options.tiny:
        yield "gateway's cache_aware", peer


async def _measure(
    report: Report,
    table: str,
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
            clients = IdClients(url, workload, seed)
            took = await clients.run()
    report.add(
        table,
        name,
        hit=clients.cached / clients.tokens,
        ttft_ms=quantiles(clients.ttft_s, n=20)[-1] * 1000,
        makespan_s=took,
    )


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    body = {"input_ids": [*IDS[:4]], "sampling_params": {"max_new_tokens": 1}}
    try:
        return (await client.post(f"{url}/generate", json=body)).is_success
    except httpx.TransportError:
        return False


def _compare(report: Report, title: str) -> None:
    """Note a problem where the simulation and the engines disagree."""
    real, simulated = (report.samples[f"{title}: {kind}"] for kind in _KINDS)
    hits = {
        name: tuple(median(sample["hit"] for sample in of[name]) for of in (real, simulated)) for name in real
    }
    for name, (found, expected) in hits.items():
        if abs(found - expected) > _NEAR:
            report.problem(f"{title}: {name}: hit rate {found:.2f}, simulated {expected:.2f}")
    for one, two in combinations(hits, 2):
        (found_one, expected_one), (found_two, expected_two) = hits[one], hits[two]
        if abs(expected_one - expected_two) > _NEAR and (found_one < found_two) != (
            expected_one < expected_two
        ):
            report.problem(f"{title}: the hit rates of {one} and {two} are not in the simulated order")


async def _measure_servers(options: Options, report: Report, engines: Sequence[str], directory: Path) -> None:
    for workload in options.pick(_WORKLOADS, tiny=(_TINY,)):
        title = workload.name
        if not options.wants(title):
            continue
        for seed in range(options.rounds):
            for name, peer in _peers(options):
                table = f"{title}: simulation"
                add_outcome(report, table, _SIMULATED, name, workload, seed, engines=_ENGINES, costs=_COSTS)
                await _measure(report, f"{title}: engines", workload, name, peer, engines, seed, directory)
        _show(options, report, title)


async def _measure_ranks(options: Options, report: Report, engine: str, directory: Path) -> None:
    for workload in options.pick(_RANK_WORKLOADS, tiny=(_TINY,)):
        title = f"{workload.name}; {_RANKS} ranks"
        if not options.wants(title):
            continue
        for seed in range(options.rounds):
            for name, flags in options.pick(_RANK_FLAGS, tiny=_RANK_FLAGS[-1:]):
                random.seed(seed)
                ranks = Ranks(_RANKS, aware="--dp-aware" in flags)
                make = _SIMULATED["cache_aware"]
                outcome = simulate(make, workload, engines=1, costs=_COSTS, ranks=ranks, seed=seed)
                report.add(f"{title}: simulation", name, **figures(outcome))
                peer = router(name, "--policy", "cache_aware", *flags)
                await _measure(report, f"{title}: engines", workload, name, peer, [engine], seed, directory)
        _show(options, report, title)
        if not options.tiny:
            found, expected = (_ratio(report, f"{title}: {kind}") for kind in _KINDS)
            if (found < 1) != (expected < 1):
                report.problem(f"{title}: TTFT p95 on / off is {found:.2f}, simulated {expected:.2f}")


def _ratio(report: Report, table: str) -> float:
    """Return the TTFT p95 with ``--dp-aware``, divided by that without."""
    off, on = (median(each["ttft_ms"] for each in report.samples[table][name]) for name, _ in _RANK_FLAGS)
    return on / off


def _show(options: Options, report: Report, title: str) -> None:
    for kind in reversed(_KINDS):
        report.show(f"{title}: {kind}", _COLUMNS)
    if not options.tiny:
        _compare(report, title)


async def _run(options: Options, report: Report, directory: Path) -> None:
    ranked = (*_FLAGS, "--dp-size", f"{_RANKS}")
    if options.tiny:  # one engine for all
        async with serving_engine(directory, *ranked) as engine:
            await _measure_servers(options, report, [engine], directory)
            await _measure_ranks(options, report, engine, directory)
        return
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(serving_engine(directory, *_FLAGS)) for _ in range(_ENGINES)
        ]
        await _measure_servers(options, report, engines, directory)
    async with serving_engine(directory, *ranked) as engine:
        await _measure_ranks(options, report, engine, directory)


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
