"""The simulation: clients send their requests through a policy to engines."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from statistics import mean, quantiles

from benchmarks.simulated.engine import Costs, Generation
from benchmarks.simulated.fleets import MakeFleet, Ranks, Servers
from benchmarks.simulated.prompts import Text
from benchmarks.simulated.workloads import Turn, Workload
from router_core import Exchange, Worker
from router_core.request import Request
from slime_policies import Policy

__all__ = ["Outcome", "simulate", "simulate_fleet"]

#: Time between the beginnings of two clients, in seconds.
_APART_S = 0.000_2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a run. ``hit_rate``: cached tokens, as a share of all tokens of prompts.

    ``ttft_p95_s``: time to the first token. ``tpot_p95_s``: mean time between two tokens of an answer. Both are 95th
    percentiles over the requests. ``makespan_s``: time until the last answer.

    ``imbalance``: requests of the busiest rank, divided by the mean over the ranks. Engines that only decode do not
    count. An engine without ranks counts as one rank.
    """

    hit_rate: float
    ttft_p95_s: float
    tpot_p95_s: float
    makespan_s: float
    imbalance: float


def simulate(
    make: Callable[[Callable[[], float]], Policy],
    workload: Workload,
    *,
    engines: int = 8,
    costs: Costs = Costs(),  # noqa: B008  (frozen)
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    seed: int = 0,
    names_lengths: bool = True,
    writes_ids: bool = False,
) -> Outcome:
    """Run ``workload`` with the policy that ``make(clock)`` returns, and return the outcome.

    ``names_lengths``: each request has the length of its answer as its ``max_new_tokens``. ``writes_ids``: prompts are
    ``input_ids``, else texts.
    """
    return simulate_fleet(
        lambda clock, at: Servers(make(clock), engines, costs, at, ranks, workload.joined_s),
        workload,
        seed=seed,
        names_lengths=names_lengths,
        writes_ids=writes_ids,
    )


def simulate_fleet(
    make: MakeFleet,
    workload: Workload,
    *,
    seed: int = 0,
    names_lengths: bool = True,
    writes_ids: bool = False,
) -> Outcome:
    """Run ``workload`` with the fleet that ``make`` returns, and return the outcome."""
    return _Simulation(make, workload, seed, names_lengths=names_lengths, writes_ids=writes_ids).run()


class _Simulation:
    def __init__(
        self, make: MakeFleet, workload: Workload, seed: int, *, names_lengths: bool, writes_ids: bool
    ) -> None:
        self._names_lengths = names_lengths
        self._writes_ids = writes_ids
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._fleet = make(lambda: self._now, self.at)
        self._sessions = count()
        self._workload = workload
        self._random = random.Random(seed)
        self._done: list[Generation] = []

    def at(self, time: float, call: Callable[[float], None]) -> None:
        """Call ``call(time)`` at ``time``."""
        heapq.heappush(self._events, (time, next(self._order), call))

    def run(self) -> Outcome:
        for _ in range(self._workload.steps):
            conversations = iter(self._workload.make(self._random))

            def begin(now: float, left: Iterator[list[Turn]] = conversations) -> None:
                turns = next(left, None)
                if turns is not None:
                    _Client(self, turns, begin).go_on(now, Text())

            for number in range(self._workload.concurrent):
                self.at(self._now + number * _APART_S, begin)
            while self._events:
                self._now, _, call = heapq.heappop(self._events)
                call(self._now)
        sent = self._fleet.sent
        return Outcome(
            sum(each.cached for each in self._done) / sum(each.prompt.tokens for each in self._done),
            _p95(each.first_s - each.sent_s for each in self._done),
            _p95((each.done_s - each.first_s) / max(1, each.new_tokens - 1) for each in self._done),
            self._now,
            max(sent) / mean(sent),
        )

    def session(self) -> str | None:
        """Return the name of a new session; None if the requests of the workload name no sessions."""
        return f"session {next(self._sessions)}" if self._workload.has_sessions else None

    def ask(
        self,
        now: float,
        prompt: Text,
        turn: Turn,
        session: str | None,
        kept: Worker | None,
        done: Callable[[Generation], None],
    ) -> Worker | None:
        """Send a request. ``kept``: the worker of its session; None if there is none yet, or no session.

        Returns the worker for the next request of the session; None without a session.
        """
        limit = b"%d" % turn.new_tokens if self._names_lengths else b"null"
        if self._writes_ids:
            written = b'"input_ids": [%s]' % ",".join(map(str, prompt.ids())).encode()
        else:
            written = b'"text": "%s"' % prompt.written()
        body = b'{%s, "sampling_params": {"max_new_tokens": %s}}' % (written, limit)
        exchange = Exchange(Request("POST", b"/generate", [], body), session=session)

        def ended(generation: Generation) -> None:
            self._done.append(generation)
            done(generation)

        worker = self._fleet.send(now, exchange, prompt, turn.new_tokens, kept, ended)
        return worker if self._workload.has_sessions else None


def _p95(values: Iterable[float]) -> float:
    return quantiles(values, n=20)[-1]


class _Client:
    """One conversation. ``over(time)`` is called at its end."""

    def __init__(self, simulation: _Simulation, turns: list[Turn], over: Callable[[float], None]) -> None:
        self._simulation = simulation
        self._turns = iter(turns)
        self._over = over
        self._session = simulation.session()
        self._worker: Worker | None = None

    def go_on(self, now: float, history: Text) -> None:
        """Send the next request, after the client's pause. After the last turn, end the conversation."""
        turn = next(self._turns, None)
        if turn is None:
            self._over(now)
        elif turn.think_s:
            self._simulation.at(now + turn.think_s, lambda then: self._ask(then, turn, history))
        else:
            self._ask(now, turn, history)

    def _ask(self, now: float, turn: Turn, history: Text) -> None:
        prompt = turn.prompt or history.then(turn.added)
        self._worker = self._simulation.ask(now, prompt, turn, self._session, self._worker, self._answered)

    def _answered(self, generation: Generation) -> None:
        self.go_on(generation.done_s, generation.answer)
