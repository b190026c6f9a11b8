"""Fleets of simulated engines: regular servers, with data-parallel ranks or without, and prefill/decode pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulated.engine import Costs, Engine, Generation
from benchmarks.simulated.prompts import Text
from router_core import Exchange, Worker
from router_core.pool import WorkerPool
from slime_policies import Auto, CacheAware, Corrected, LeastInflight, Policy, PowerOfTwo
from slime_policies.kv_events.batches import Event
from slime_policies.tokens_in_flight import TokensInFlight
from slime_sglang.ranks import split

__all__ = ["At", "Done", "Earliest", "Fleet", "MakeFleet", "Pairs", "Ranks", "Servers"]

Clock = Callable[[], float]
#: ``at(time, call)`` calls ``call(time)`` at that time.
At = Callable[[float, Callable[[float], None]], None]
Done = Callable[[Generation], None]


class Fleet(Protocol):
    """Engines, and the policies that choose among them."""

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker | None:
        """Send a request to ``kept``, the worker of its session. If ``kept`` is None, the policy chooses a worker.

        If the policy keeps sessions on workers by itself, it chooses for each request, and ``kept`` is ignored.
        Returns the worker for the next requests of the session, or None if it is not known yet.
        """
        ...

    @property
    def sent(self) -> Sequence[int]:
        """The number of requests of each rank of the engines that prefill. Engines without ranks count as one rank."""
        ...


#: Makes a fleet with the clock of the simulation.
MakeFleet = Callable[[Clock, At], Fleet]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks of a server.

    ``aware``: the policy chooses the rank; False: the server uses its ranks in turn. ``together``: the ranks of a
    server step together, as with SGLang's ``--enable-dp-attention``.
    """

    count: int = 1
    aware: bool = True
    together: bool = False


class Servers:
    """``count`` regular servers, and one policy. Half of the servers join at ``joined_s``; 0: no server joins later."""

    def __init__(
        self,
        policy: Policy,
        count: int,
        costs: Costs,
        at: At,
        ranks: Ranks = Ranks(),
        joined_s: float = 0.0,
    ) -> None:
        self._policy = policy
        self._joined_s = joined_s
        self._places_sessions = isinstance(policy, Auto) and policy.places_sessions
        self._load = _load_of(policy)
        servers = [Worker(f"http://10.0.0.{number}:30000") for number in range(1, count + 1)]
        pool = WorkerPool(lambda worker, change: None)
        for server in servers:
            split(pool, server, ranks.count if ranks.aware else 1)
        self._workers = tuple(worker for server in servers for worker in server.choices)
        self._places: dict[Worker, list[_Place]] = {}
        for server in servers:
            if ranks.together:
                engine = Engine(costs, at, ranks.count)
                places = [_Place(engine, rank) for rank in range(ranks.count)]
            else:
                places = [_Place(Engine(costs, at)) for _ in range(ranks.count)]
            if ranks.aware:
                self._places |= {
                    worker: [place] for worker, place in zip(server.choices, places, strict=True)
                }
            else:
                self._places[server] = places
        self._turns = dict.fromkeys(self._places, 0)
        if isinstance(policy, CacheAware) and policy.blocks is not None:
            for worker, [place] in self._places.items():
                blocks = policy.blocks.open(worker.id)
                blocks.is_in_sync = True
                place.tell(blocks.apply)

    @property
    def sent(self) -> Sequence[int]:
        return [place.sent for places in self._places.values() for place in places]

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker:
        """See :class:`Fleet`."""
        load = self._load
        workers = self._workers if now >= self._joined_s else self._workers[: len(self._workers) // 2]
        if self._places_sessions:
            kept = None
        worker = kept or self._policy(exchange, workers)
        worker.in_flight += 1
        if load is not None:
            load.count(exchange, worker)

        def begun() -> None:
            if load is not None:
                load.begin(exchange)

        def ended(generation: Generation) -> None:
            worker.in_flight -= 1
            if kept is None and isinstance(self._policy, Corrected):
                self._policy.answered(exchange, prompt.tokens, generation.cached)
            exchange.close()
            if load is not None:
                load.mean_length.learn(generation.new_tokens)
            done(generation)

        places = self._places[worker]
        place = places[self._turns[worker] % len(places)]
        self._turns[worker] += 1
        place.send(Generation(prompt, new_tokens, prompt.then(new_tokens), now, ended, begun), now)
        return worker


class Earliest(Servers):
    """Regular servers. A request without a session's worker goes to the worker with the earliest first token.

    Only the simulation knows when first tokens come, so no router can have this policy.
    """

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker:
        """See :class:`Fleet`."""
        if kept is None:
            kept = min(self._workers, key=lambda worker: self._places[worker][0].first_token_s(prompt, now))
        return super().send(now, exchange, prompt, new_tokens, kept, done)


class Pairs:
    """Prefill and decode servers, with a policy for each kind. A decode engine begins when it has the keys and values.

    ``transfer_per_s``: tokens whose keys and values are transferred in a second. ``holds_prefill``: a request counts at
    its prefill server until the answer has ended, as in the gateway; else until its prompt has been computed.
    """

    def __init__(
        self,
        policies: tuple[Policy, Policy],
        counts: tuple[int, int],
        costs: Costs,
        at: At,
        transfer_per_s: float,
        *,
        holds_prefill: bool = False,
    ) -> None:
        self._policies = policies
        self._loads = tuple(_load_of(policy) for policy in policies)
        self._at = at
        self._transfer_per_s = transfer_per_s
        self._holds_prefill = holds_prefill
        self._prefills = {
            Worker(f"http://10.0.1.{number}:30000", "prefill"): _Place(Engine(costs, at))
            for number in range(1, counts[0] + 1)
        }
        self._decodes = {
            Worker(f"http://10.0.2.{number}:30000", "decode"): _Place(Engine(costs, at))
            for number in range(1, counts[1] + 1)
        }

    @property
    def sent(self) -> Sequence[int]:
        return [place.sent for place in self._prefills.values()]

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker:
        """See :class:`Fleet`."""
        prefill = kept or self._policies[0](exchange, [*self._prefills])
        decode = self._policies[1](exchange, [*self._decodes])
        for worker, load in zip((prefill, decode), self._loads, strict=True):
            worker.in_flight += 1
            if load is not None:
                load.count(exchange, worker)
        answer = prompt.then(new_tokens)

        def prefilled(generation: Generation) -> None:
            if kept is None and isinstance(self._policies[0], Corrected):
                self._policies[0].answered(exchange, prompt.tokens, generation.cached)
            if (load := self._loads[0]) is not None:
                load.begin(exchange)
            prefill.in_flight -= not self._holds_prefill
            arrives = generation.done_s + prompt.tokens / self._transfer_per_s
            there = Generation(
                prompt, max(1, new_tokens - 1), answer, now, ended, _nothing, cached=generation.cached, left=0
            )
            self._at(arrives, lambda then: self._decodes[decode].send(there, then))

        def ended(generation: Generation) -> None:
            prefill.in_flight -= self._holds_prefill
            decode.in_flight -= 1
            exchange.close()
            if (load := self._loads[1]) is not None:
                load.mean_length.learn(new_tokens)
            done(generation)

        self._prefills[prefill].send(Generation(prompt, 1, prompt, now, prefilled, _nothing), now)
        return prefill


class _Place:
    """A rank of an engine. ``sent``: the number of requests that it got."""

    def __init__(self, engine: Engine, rank: int = 0) -> None:
        self._engine = engine
        self._rank = rank
        self.sent = 0

    def tell(self, changed: Callable[[Event], None]) -> None:
        self._engine.tell(changed, self._rank)

    def first_token_s(self, prompt: Text, now: float) -> float:
        return self._engine.first_token_s(prompt, now, self._rank)

    def send(self, generation: Generation, now: float) -> None:
        self.sent += 1
        self._engine.send(generation, now, self._rank)


def _load_of(policy: Policy) -> TokensInFlight | None:
    return policy.load if isinstance(policy, LeastInflight | PowerOfTwo) else None


def _nothing() -> None: ...
