"""Fleets of simulated engines: regular servers, with data-parallel ranks or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulated.engine import Costs, Engine, Generation
from benchmarks.simulated.prompts import Text
from router_core import Exchange, Worker
from slime_policies import CacheAware, Corrected, LeastInflight, Policy, PowerOfTwo
from slime_policies.kv_events.batches import Event
from slime_policies.tokens_in_flight import TokensInFlight

__all__ = ["At", "Done", "Fleet", "MakeFleet", "Ranks", "Servers"]

Clock = Callable[[], float]
#: ``at(time, call)`` calls ``call(time)`` at that time.
At = Callable[[float, Callable[[float], None]], None]
Done = Callable[[Generation], None]


class Fleet(Protocol):
    """Engines, and the policies that choose among them."""

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker:
        """Send a request to ``kept``, or to the worker that the policy chooses. Returns the worker of its session."""
        ...

    @property
    def sent(self) -> Sequence[int]:
        """Requests of each engine that prefills."""
        ...


#: Makes a fleet with the clock of the simulation.
MakeFleet = Callable[[Clock, At], Fleet]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks of each server. ``aware``: the policy chooses the rank; else the server uses them in turn.

    ``together``: they step together, as with SGLang's ``--enable-dp-attention``.
    """

    count: int = 1
    aware: bool = True
    together: bool = False


class Servers:
    """``count`` regular servers, and one policy."""

    def __init__(self, policy: Policy, count: int, costs: Costs, at: At, ranks: Ranks = Ranks()) -> None:
        self._policy = policy
        self._load = _load_of(policy)
        servers = [Worker(f"http://10.0.0.{number}:30000") for number in range(1, count + 1)]
        for server in servers:
            server.split(ranks.count if ranks.aware else 1)
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
                blocks.is_true = True
                place.tell(blocks.apply)

    @property
    def sent(self) -> Sequence[int]:
        return [place.sent for places in self._places.values() for place in places]

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> Worker:
        """See :class:`Fleet`."""
        load = self._load
        worker = kept or self._policy(exchange, self._workers)
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


class _Place:
    """A rank of an engine. ``sent``: requests."""

    def __init__(self, engine: Engine, rank: int = 0) -> None:
        self._engine = engine
        self._rank = rank
        self.sent = 0

    def tell(self, changed: Callable[[Event], None]) -> None:
        self._engine.tell(changed, self._rank)

    def send(self, generation: Generation, now: float) -> None:
        self.sent += 1
        self._engine.send(generation, now, self._rank)


def _load_of(policy: Policy) -> TokensInFlight | None:
    return policy.load if isinstance(policy, LeastInflight | PowerOfTwo) else None
