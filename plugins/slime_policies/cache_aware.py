"""Policy that weighs the part of a prompt in a worker's cache against the worker's load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.horizons import Horizons
from slime_policies.kv_events import Blocks
from slime_policies.long_requests import LongRequests
from slime_policies.matches import Match, Offered, cheapest, cost_of, exact_sizes, match_of, without
from slime_policies.pending import Pending
from slime_policies.prefixes import Node, Prefixes, Prompt, Use
from slime_policies.recent_sessions import RecentSessions
from slime_policies.settings import Settings, unbalanced
from slime_policies.worker_state import REQUEST, WorkerState

__all__ = ["CacheAware", "Home"]

#: The cost of each prompt token that a worker has to compute. Meanwhile all other requests of the worker wait.
_MISSING = 3.0
#: A prefix that more than about this number of requests had is worth a copy on a further worker. So its tokens cost
#: less at workers that lack them. A group of samples of one prompt rarely has more requests than this number.
_GROUP = 16.0
#: The cost of each session that a worker got lately. It counts only when a worker is chosen for a new session. Between
#: two turns a session may have no request in flight, so the number of requests in flight does not include it.
_SESSION = REQUEST / 2
#: The largest number of bits for workers. A worker that comes back gets a new bit. When all bits are used, the policy
#: forgets what all workers have.
_MAX_BITS = 4096
#: In a shortfall, a worker lacked more than ``_SHORT_TOKENS`` of the tokens that it was believed to have, and more than
#: the part ``_SHORT_PART`` of them. After ``_SHORTFALLS`` shortfalls the worker's horizon moves (see CacheAware).
_SHORT_TOKENS, _SHORT_PART, _SHORTFALLS = 512, 0.25, 3
_NO_WORKERS = Offered((), [], 0, {})


@dataclass(slots=True)
class _Belief:
    """A choice, and the belief that it relied on.

    ``share``: the believed part of the prompt in the worker's cache. ``checked``: the number of the choice that last
    used that part, if an answer can show that the part was evicted; else 0.
    """

    state: WorkerState
    use: Use
    share: float
    checked: int


class Home(NamedTuple):
    """The worker that got the earlier requests of a conversation. ``lacking``: prompt tokens that it has to prefill.

    Another worker is chosen only if its cost is lower by more than ``margin`` tokens. ``turns``: expected requests of
    the conversation. A worker prefills the tokens that it lacks only once for all these requests, so each request bears
    a part of that cost.
    """

    worker: Worker
    lacking: float
    margin: float
    turns: int


class CacheAware:
    """Chooses the worker with the least cost; among equal workers, the worker that was chosen longest ago.

    The cost of a worker, in tokens, is the sum of:

    - 240 for each request in flight, more for a request with a very high ``max_new_tokens``
      (:class:`slime_policies.long_requests.LongRequests`),
    - 0.5 for each token of other prompts that the worker probably still has to prefill,
    - 3 for each token of this prompt that the worker lacks. In a prefix that many requests had, a token costs less:
      ``3 / (1 + (requests / 16) ** 2)``. So workers with little load get a copy of the prefix.

    A part of the prompt that all workers have, or that no worker has, does not change the choice. The numbers were
    chosen with ``benchmarks/scheduling``. For the first request of a session, each session that a worker got lately
    counts as half a request, but not at decode workers.

    The policy believes that each worker has the prefixes that it was sent. Engines evict prefixes, so a worker may have
    a horizon, which is the number of a choice. A prefix that no later choice used counts as evicted from that worker.

    With ``--kv-events``, the blocks that the engine reports replace the belief, if the prompt is given as ids and no
    report is missing. Prompts that the worker was sent and has not answered yet count as cached, too.

    The rules of the SGLang gateway apply, too, if their flags are given. If the requests in flight differ by more than
    ``balance_abs_threshold`` and by more than a factor of ``balance_rel_threshold``, the worker with the fewest is
    chosen, unless ``auto`` has given the session a worker already. A worker that has at most the part
    ``cache_threshold`` of the prompt counts as having none of it.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._note = f"cache_aware {id(self)}"  # prefill and decode workers may each have such a policy
        self._clock = clock
        self._prefixes = Prefixes(settings.max_tree_size)
        self._horizons = Horizons()
        self._states: dict[str, WorkerState] = {}
        self._bits = self._choices = 0
        self._has_thresholds = settings.has_balance_thresholds
        #: Blocks that workers have according to their KV events; None without ``--kv-events``.
        self.blocks = Blocks(settings.kv_events_max_blocks) if settings.kv_events else None
        self._pending = Pending()
        self._long = LongRequests()
        self._recent = RecentSessions()
        #: The workers of the last choice. The next choice mostly has the same workers.
        self._last = _NO_WORKERS

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self.choose(exchange, workers)

    def choose(
        self,
        exchange: Exchange,
        workers: Sequence[Worker],
        home: Home | None = None,
    ) -> Worker:
        """Return the worker with the least cost; without a prompt, a worker with the fewest requests in flight.

        ``home``: the worker that got the earlier requests of the conversation, or None.
        """
        prompt = Prompt.of(exchange.request.body)
        if not prompt.digests:
            return least_in_flight(workers)
        if self._bits > _MAX_BITS:
            self.forget_all()
        now = self._clock()
        offered = self._last
        if workers is not offered.workers and workers != offered.workers:
            offered = self._last = Offered.of(workers, [self.state(worker) for worker in workers])
        exact: Mapping[int, int] = {}
        if self.blocks is not None:
            exact = exact_sizes(self.blocks, exchange.request.body, prompt.size, offered)
        nodes = self._prefixes.find(prompt)
        matches = self._match(prompt, nodes, offered.bits, exact)
        if home is not None:
            bit = self.state(home.worker).bit
            own = match_of(bit, matches)
            cost, size, use = own.cost, own.size, own.use
            if bit not in exact:
                cost, use = _MISSING * home.lacking, None
                size = prompt.size - int(home.lacking * prompt.per_token)
            own = Match(bit, cost - home.margin * home.turns, size, use)
            matches = [
                match._replace(cost=match.cost / home.turns) for match in (*without(bit, matches), own)
            ]
        kind = workers[0].server.worker_type
        # A decode worker is chosen for each request, not once for the session.
        is_new = home is None and exchange.session is not None and kind != "decode"
        further = self._recent.counts(workers, now, _SESSION) if is_new else []
        more = (
            self._long.more(exchange, prompt.start) if kind != "prefill" else 0
        )  # a prefill worker does not decode
        if more:
            avoided = [REQUEST * (state.long - state.more) for state in offered.states]
            further = [*map(add, further, avoided)] if further else avoided
        # The gateway's policy knows no sessions, so its thresholds say nothing about a conversation that has a worker.
        thresholds_apply = self._has_thresholds and home is None
        if thresholds_apply and unbalanced([worker.in_flight for worker in workers], self._settings):
            chosen = workers.index(least_in_flight(workers))
        else:
            chosen = cheapest(offered, matches, now, further)
        state = offered.states[chosen]
        self._choices += 1
        state.chosen = self._choices
        if is_new:
            self._recent.add(workers[chosen], workers, now)
        _, _, matched, before = match_of(state.bit, matches)
        state.add(workers[chosen], (prompt.size - matched) / prompt.per_token, now)
        self._long.count(exchange, state, more)
        use = Use(self._choices)
        self._prefixes.add(prompt, nodes, state.bit, use, self._horizons)
        if isinstance(earlier := exchange.notes.get(self._note), _Belief):
            self._pending.remove(earlier.use.number)  # the earlier attempt failed
        if state.bit in exact:
            self._pending.add(use.number, state.bit, prompt.digests, now)
        # A prompt without an answer may not be computed yet, so missing tokens would not prove an eviction.
        checked = before.number if before is not None and before.is_answered else 0
        exchange.notes[self._note] = _Belief(state, use, matched / prompt.size, checked)
        return workers[chosen]

    def state(self, worker: Worker) -> WorkerState:
        """Return the state of ``worker``. The worker has a new state after its cache was forgotten."""
        state = self._states.get(worker.id)
        if state is None:
            state = self._states[worker.id] = self._new_state()
        return state

    def _new_state(self) -> WorkerState:
        self._bits += 1
        return WorkerState(1 << (self._bits - 1))

    def _match(
        self, prompt: Prompt, nodes: Sequence[Node], having: int, exact: Mapping[int, int]
    ) -> list[Match]:
        """Return the parts of ``prompt`` that the offered workers have in their caches. ``having``: the workers' bits.

        ``nodes``: the known prefixes of ``prompt``. ``exact``: by the bit of a worker, the bytes of ``prompt`` that the
        worker has for certain. The match of such a worker has no last use.
        """
        known_bits = 0
        for bit in exact:
            known_bits |= bit
        weight = _MISSING / prompt.per_token
        cost = 0.0  # of the nodes so far, for a worker that has none of them
        #: For workers that have the nodes so far and no more: the workers' bits, the cost and the bytes of these nodes,
        #: and the last use of the last node.
        ends: list[tuple[int, float, int, Use | None]] = []
        #: The bytes and the cost of each prefix, for workers whose bytes are known.
        marks: list[tuple[int, float]] = []
        size = 0
        use: Use | None = None
        for node in nodes:
            if known_bits:
                marks.append((size, cost))
            holders = node.workers & ~self._horizons.evicted_by(node.use.number)
            if known_bits:
                holders = holders & ~known_bits | self._pending.at(node.digests[-1]) & known_bits
            if (still := having & holders) != having:
                ends.append((having ^ still, cost, size, use))
                having = still
            use = node.use
            groups = node.visits / _GROUP
            cost += (node.size - size) * weight / (1.0 + groups * groups)
            size = node.size
        ends.append((having, cost, size, use))
        whole = cost + (prompt.size - size) * weight
        marks.append((size, cost))
        least = prompt.size * (self._settings.cache_threshold or 0.0)
        matches = [
            Match(bits, whole - had, matched, use) if matched > least else Match(bits, whole, 0, None)
            for bits, had, matched, use in ends
        ]
        if not exact:
            return matches
        known_costs = {0: 0.0}  # many workers have the same part of a prompt
        sizes: list[Match] = []
        for bit, true in exact.items():
            matched = max(true, match_of(bit, matches).size)
            if matched <= least:
                matched = 0
            if matched not in known_costs:
                known_costs[matched] = cost_of(matched, marks, weight)
            sizes.append(Match(bit, whole - known_costs[matched], matched, None))
        return [*without(known_bits, matches), *sizes]

    def expects(self, exchange: Exchange) -> bool:
        """Return True when :meth:`choose` noted its belief for ``exchange``."""
        return self._note in exchange.notes

    def answered(self, exchange: Exchange, prompt_tokens: int, cached_tokens: int) -> None:
        """Move the worker's horizon at every third answer with clearly fewer cached tokens than believed.

        Each of the three answers belongs to a prefix with a last use. The horizon becomes the oldest of these last
        uses. One such answer would prove too little: an engine evicts in the order of its own steps, so it may still
        have prefixes whose last use is older than that of an evicted prefix.
        """
        belief: _Belief | None = exchange.notes.get(self._note)
        if belief is None or belief.use.is_answered or not belief.state.bit:
            return
        belief.use.is_answered = True
        self._pending.remove(belief.use.number)
        believed = belief.share * prompt_tokens
        if belief.checked and believed - cached_tokens > max(_SHORT_TOKENS, _SHORT_PART * believed):
            state = belief.state
            state.missed.append(belief.checked)
            if len(state.missed) == _SHORTFALLS:
                self._horizons.move(state.bit, min(state.missed))
                state.missed.clear()

    def forget(self, worker: Worker) -> None:
        """Forget what ``worker`` has in its cache. Its place in the order of equal workers stays."""
        self._last = _NO_WORKERS
        for choice in worker.choices:
            if (state := self._states.pop(choice.id, None)) is not None:
                self._horizons.drop(state.bit)
                state.bit = 0  # from now on, answers to earlier requests prove nothing
                new = self._states[choice.id] = self._new_state()
                new.chosen = state.chosen

    def forget_all(self) -> None:
        """Forget what all workers have in their caches."""
        self._prefixes.clear()
        self._horizons.clear()
        self._pending.clear()
        for state in self._states.values():
            state.bit = 0
        self._states.clear()
        self._last = _NO_WORKERS
        self._bits = 0
