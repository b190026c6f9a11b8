"""The plugin that lets a policy choose the worker of each request."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from router_core import Exchange, Worker, hookimpl
from router_core.router import Router
from router_core.sender import Sender
from router_core.workers import WorkerType
from slime_policies.auto import Auto
from slime_policies.bucket import Bucket
from slime_policies.cache_aware import CacheAware
from slime_policies.cached_tokens import CachedTokens
from slime_policies.consistent_hashing import ConsistentHashing
from slime_policies.correcting import Correcting
from slime_policies.counting import Counting
from slime_policies.engine_loads import EngineLoads
from slime_policies.installed import Choose, blaming, installed_policies, warn_of_ignored
from slime_policies.kv_events import Blocks
from slime_policies.least_inflight import LeastInflight
from slime_policies.manual import Manual
from slime_policies.policy import Corrected, Policy, Remembering, Selective
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.prefix_hash import PrefixHash
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin
from slime_policies.settings import Settings, add_policy_options
from slime_policies.tokens_in_flight import TokensInFlight
from slime_sglang.generation import at_generation

if TYPE_CHECKING:
    from slime_control.contracts import ControlEvents
    from slime_metrics.contracts import Metrics

__all__ = ["POLICIES", "CorrectedPolicies", "PairPolicies", "Policies", "add_options", "make_plugin"]


def _load(settings: Settings) -> TokensInFlight | None:
    """Return the counter of loads that ``--load`` demands, for one policy; None if requests in flight are the load."""
    if settings.load == "engine":
        return EngineLoads(settings.load_poll_interval_secs)
    return TokensInFlight() if settings.load == "tokens" else None


POLICIES: dict[str, Callable[[Settings], Policy]] = {
    "auto": Auto,
    "least_inflight": lambda settings: LeastInflight(_load(settings)),
    "round_robin": lambda settings: RoundRobin(),
    "random": lambda settings: RandomChoice(),
    "power_of_two": lambda settings: PowerOfTwo(_load(settings)),
    "cache_aware": CacheAware,
    "manual": Manual,
    "consistent_hashing": lambda settings: ConsistentHashing(),
    "consistent_hash": lambda settings: ConsistentHashing(),  # as vLLM's router spells it
    "prefix_hash": PrefixHash,
}
#: Policies for prefill workers only.
_FOR_PREFILL: dict[str, Callable[[Settings], Policy]] = {"bucket": Bucket}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_policy_options(parser, list(_known()), list(_FOR_PREFILL))


def make_plugin(options: argparse.Namespace) -> Policies | PairPolicies:
    """Make the plugin with the policy of ``--policy``, or with the policies for pairs. Raises SettingsError."""
    settings = Settings.from_options(options)
    known = _known()
    warn_of_ignored(POLICIES)
    policy = known[settings.policy](settings)
    choose = _chooser(policy, settings.policy)
    if not settings.pairs:
        return (
            CorrectedPolicies(policy, choose) if isinstance(policy, Corrected) else Policies(policy, choose)
        )
    of_prefill, of_decode = settings.policy_in_pairs("prefill"), settings.policy_in_pairs("decode")
    prefill, decode = (known | _FOR_PREFILL)[of_prefill](settings), known[of_decode](settings)
    return PairPolicies(
        {"regular": policy, "prefill": prefill, "decode": decode},
        {"regular": choose, "prefill": _chooser(prefill, of_prefill), "decode": _chooser(decode, of_decode)},
    )


def _known() -> dict[str, Callable[[Settings], Policy]]:
    """Return, by name, the policies for all types of workers. Other packages' policies replace none of this package."""
    return {**POLICIES, **{name: make for name, make in installed_policies().items() if name not in POLICIES}}


def _chooser(policy: Policy, name: str) -> Choose:
    return policy if name in POLICIES or name in _FOR_PREFILL else blaming(policy, name)


class Policies:
    """Lets ``policy`` choose the worker. ``choose``, if given, is called instead of the policy."""

    def __init__(self, policy: Policy, choose: Choose | None = None) -> None:
        self.policy = policy
        self._choose: Choose = choose or policy

    @hookimpl
    def setup(self, router: Router) -> None:
        router.pool.keeps_sessions = not isinstance(self.policy, ConsistentHashing)
        if isinstance(self.policy, Auto):
            _place_sessions(router, self.policy)

    @hookimpl(trylast=True)  # a policy of another plugin goes first
    def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self._choose(exchange, workers)

    @hookimpl(trylast=True)  # among the innermost: it sees each attempt at a worker
    def sender(self, inner: Sender) -> Sender:
        load = _load_of(self.policy)
        return inner if load is None else Counting(inner, lambda worker: load)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        _forget_on_flush(router, [self.policy])
        _poll(router, {"regular": self.policy})
        _follow_events(router, {"regular": self.policy})
        yield

    @hookimpl
    def worker_changed(self, worker: Worker) -> None:
        if isinstance(self.policy, Remembering):
            self.policy.forget(worker)

    @hookimpl
    async def on_weight_update(self) -> None:
        if isinstance(self.policy, Remembering):
            self.policy.forget_all()


class CorrectedPolicies(Policies):
    """Lets a policy choose, and tells the policy how many tokens of each prompt the worker had in its cache."""

    def __init__(self, policy: Corrected, choose: Choose | None = None) -> None:
        super().__init__(policy, choose)
        self._answered = policy.answered
        self._expects = policy.expects if isinstance(policy, Selective) else lambda exchange: True

    @hookimpl(trylast=True)  # called first: later plugins may read, wrap or replace the worker's answer
    def post_response(self, exchange: Exchange) -> None:
        reply = exchange.reply
        if reply is None or reply.status != 200 or exchange.worker is None:
            return
        if self._expects(exchange) and at_generation(exchange.request):
            CachedTokens(reply, partial(self._answered, exchange)).watch()


class PairPolicies:
    """A policy for each type of worker. The workers that are offered for one choice have the same type.

    ``choose``: for each type of worker, the function that is called instead of the policy.
    """

    def __init__(self, policies: dict[WorkerType, Policy], choose: Mapping[WorkerType, Choose]) -> None:
        self.policies = policies
        self._choose = choose

    @hookimpl
    def setup(self, router: Router) -> None:
        # A session can keep only the prefill worker of its pair. So the policy for prefill workers decides whether
        # sessions keep a worker.
        router.pool.keeps_sessions = not isinstance(self.policies["prefill"], ConsistentHashing)

    @hookimpl(trylast=True)  # a policy of another plugin goes first
    def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self._choose[workers[0].server.worker_type](exchange, workers)

    @hookimpl(trylast=True)  # among the innermost: it sees each attempt at a worker
    def sender(self, inner: Sender) -> Sender:
        loads = {kind: _load_of(policy) for kind, policy in self.policies.items()}
        if any(load is not None for load in loads.values()):
            inner = Counting(inner, lambda worker: loads.get(worker.server.worker_type))
        prefill = self.policies["prefill"]
        return Correcting(inner, prefill) if isinstance(prefill, Corrected) else inner

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        _forget_on_flush(router, self.policies.values())
        _poll(router, self.policies)
        _follow_events(router, self.policies)
        yield

    @hookimpl
    def worker_changed(self, worker: Worker) -> None:
        for policy in self._remembering():
            policy.forget(worker)

    @hookimpl
    async def on_weight_update(self) -> None:
        for policy in self._remembering():
            policy.forget_all()

    def _remembering(self) -> Iterator[Remembering]:
        return (policy for policy in self.policies.values() if isinstance(policy, Remembering))


def _forget_on_flush(router: Router, policies: Iterable[Policy]) -> None:
    """Let ``policies`` forget the caches of workers when the engines are told to flush their caches."""
    events: ControlEvents | None = router.components.find("control_events")
    for policy in policies:
        if events is not None and isinstance(policy, Remembering):
            events.subscribe(on_flush=policy.forget_all)


def _place_sessions(router: Router, policy: Auto) -> None:
    """Let ``policy`` place sessions, unless its affinity is ``strict`` or another plugin chooses workers, too.

    A policy that does not place sessions leaves this to the core, which keeps each session on its worker. The core asks
    plugins for a worker only if a request has no session, or if its session has no worker that can be used.
    """
    if len(router.hooks.choosers) > 1:
        policy.places_sessions = False
    router.pool.keeps_sessions = not policy.places_sessions
    metrics: Metrics | None = router.components.find("metrics")
    if metrics is not None and policy.places_sessions:
        metrics.counter(
            "slime_session_moves_total",
            "Sessions that left a usable worker because another worker costs less.",
            lambda: policy.moves,
        )


def _load_of(policy: Policy) -> TokensInFlight | None:
    return policy.load if isinstance(policy, LeastInflight | PowerOfTwo) else None


def _poll(router: Router, policies: Mapping[WorkerType, Policy]) -> None:
    """Poll the loads of engines in the background, for each type of worker whose policy uses these loads."""
    for kind, policy in policies.items():
        load = _load_of(policy)
        if isinstance(load, EngineLoads):
            router.tasks.start_soon(load.poll, router, kind)


def _follow_events(router: Router, policies: Mapping[WorkerType, Policy]) -> None:
    """Follow the KV events of workers in the background, for each type of worker whose policy uses the events."""
    blocks: dict[WorkerType, Blocks] = {
        kind: policy.blocks
        for kind, policy in policies.items()
        if isinstance(policy, Auto | CacheAware) and policy.blocks is not None
    }
    if blocks:
        from slime_policies.kv_events.subscriptions import Subscriptions  # needs zmq, which is an extra

        subscriptions = Subscriptions(blocks)
        metrics: Metrics | None = router.components.find("metrics")
        if metrics is not None:
            subscriptions.offer(metrics)
        router.tasks.start_soon(subscriptions.run, router)
