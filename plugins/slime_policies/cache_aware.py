"""Policy that weighs what a worker has of a prompt in its cache against what it has to do."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.horizons import Horizons
from slime_policies.kv_events import Blocks
from slime_policies.kv_events.prompt_ids import PromptIds
from slime_policies.pending import Pending
from slime_policies.prefixes import Prefixes, Prompt, Use
from slime_policies.settings import Settings, unbalanced
from slime_policies.worker_state import WorkerState

__all__ = ["CacheAware", "Home"]

#: A token that a worker lacks costs as much as so many tokens that it has to prefill for others: while it computes
#: them, all its other requests wait.
_MISSING = 3.0
#: From about this many requests with the same prefix on, a further copy of its keys and values pays for itself, so a
#: missing prefix costs less. Groups of samples of one prompt are rarely larger.
_GROUP = 16.0
#: Bits of workers in use. A worker that comes back gets a new bit; with so many, all is forgotten.
_MAX_BITS = 4096
#: A worker has clearly less of a prompt than was believed, if more tokens and a larger part of these are missing;
#: after so many times its horizon moves.
_SHORT_TOKENS, _SHORT_PART, _SHORTFALLS = 512, 0.25, 3


@dataclass(slots=True)
class _Belief:
    """A choice, and the belief that it relied on.

    ``share``: part of the prompt that the worker has. ``checked``: the last use of that part, if an answer can tell
    that it was evicted, else 0.
    """

    state: WorkerState
    use: Use
    share: float
    checked: int


class Home(NamedTuple):
    """The worker that has a conversation. ``lacking``: tokens of the prompt that it has to prefill.

    Another worker is chosen only if its cost is lower by more than ``margin`` tokens.
    """

    worker: Worker
    lacking: float
    margin: float


class CacheAware:
    """Chooses the worker with the least cost; of equal ones, the one that was chosen longest ago.

    The cost of a worker, in tokens: 240 for each request in flight; half of the tokens of other prompts that it
    probably has to prefill yet; 3 for each token of this prompt that it lacks. A prefix that many requests have had
    counts for less: ``3 / (1 + (requests / 16) ** 2)``, so it is copied to more workers as their loads ask for it. What
    all workers have, or none, makes no difference. ``benchmarks/scheduling`` has chosen these numbers.

    Engines evict. Each worker has a horizon: what was last used before it, the worker is not believed to have.

    With ``--kv-events``, and for a prompt of ids, the blocks of a worker that are true count in place of the belief;
    and what it was sent and has not answered yet.

    The gateway's rules come on top where their flags are given. ``balance_abs_threshold``: if the loads differ by more
    requests, and by more than a factor of ``balance_rel_threshold``, the worker with the fewest in flight is chosen.
    ``cache_threshold``: a worker that has not seen more than this part of the prompt counts as having none of it.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._note = f"cache_aware {id(self)}"  # prefill and decode workers may have one each
        self._clock = clock
        self._prefixes = Prefixes(settings.max_tree_size)
        self._horizons = Horizons()
        self._states: dict[str, WorkerState] = {}
        self._bits = self._choices = 0
        self._has_thresholds = settings.has_balance_thresholds
        #: Blocks that workers have according to their KV events; None: nobody follows these.
        self.blocks = Blocks(settings.kv_events_max_blocks) if settings.kv_events else None
        self._pending = Pending()

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self.choose(exchange, workers)

    def choose(self, exchange: Exchange, workers: Sequence[Worker], home: Home | None = None) -> Worker:
        """Return the worker with the least cost. ``home``: what is known of one of them, besides the prefixes."""
        prompt = Prompt.of(exchange.request.body)
        if not prompt.parts:
            return least_in_flight(workers)
        if self._bits > _MAX_BITS:
            self.forget_all()
        now = self._clock()
        states = [self.state(worker) for worker in workers]
        exact = (
            {}
            if self.blocks is None
            else _exact(self.blocks, exchange.request.body, prompt.size, workers, states)
        )
        costs, seen = self._match(prompt, states, exact)
        if home is not None:
            bit = self.state(home.worker).bit
            if bit not in exact:
                costs[bit] = _MISSING * home.lacking
                seen[bit] = prompt.size - int(home.lacking * prompt.per_token), None
            costs[bit] -= home.margin
        if self._has_thresholds and unbalanced(workers, self._settings):
            chosen = workers.index(least_in_flight(workers))
        else:
            chosen = _cheapest(workers, states, costs, now)
        state = states[chosen]
        self._choices += 1
        state.chosen = self._choices
        matched, before = seen[state.bit]
        state.add(workers[chosen], (prompt.size - matched) / prompt.per_token, now)
        use = Use(self._choices)
        self._prefixes.add(prompt, state.bit, use, self._horizons)
        if isinstance(earlier := exchange.notes.get(self._note), _Belief):
            self._pending.remove(earlier.use.number)  # another worker failed the request
        if state.bit in exact:
            self._pending.add(use.number, state.bit, tuple(digest for digest, _ in prompt.parts), now)
        # What is not answered yet, the worker may not have computed yet, so its absence would prove nothing.
        checked = before.number if before is not None and before.is_answered else 0
        exchange.notes[self._note] = _Belief(state, use, matched / prompt.size, checked)
        return workers[chosen]

    def state(self, worker: Worker) -> WorkerState:
        """Return the state of ``worker``, which is another one after its cache was forgotten."""
        state = self._states.get(worker.id)
        if state is None:
            state = self._states[worker.id] = self._new_state()
        return state

    def _new_state(self) -> WorkerState:
        self._bits += 1
        return WorkerState(1 << (self._bits - 1))

    def _match(
        self, prompt: Prompt, states: Sequence[WorkerState], exact: Mapping[int, int]
    ) -> tuple[dict[int, float], dict[int, tuple[int, Use | None]]]:
        """Return, for the bit of each worker, the cost of what it lacks of ``prompt``, and what it has.

        What it has: bytes, and the last use of the longest prefix. ``exact``: by bit, the bytes that a worker has for
        certain. Such a worker has no last use.
        """
        having = known_bits = 0
        for state in states:
            having |= state.bit
        for bit in exact:
            known_bits |= bit
        weight = _MISSING / prompt.per_token
        cost = 0.0  # of the parts so far, for a worker that has none of them
        #: For workers that have the parts so far and no more: their bits, the cost of these parts, their bytes,
        #: and the last use of the last part.
        ends: list[tuple[int, float, int, Use | None]] = []
        #: The bytes and the cost of each prefix, for workers whose bytes are known.
        marks: list[tuple[int, float]] = []
        size = evicted = 0
        use: Use | None = None
        for digest, more in prompt.parts:
            known = self._prefixes.get(digest)
            if known is None:
                break
            before, use = use, known.use
            if use is not before:  # the parts of a turn have the same use
                evicted = self._horizons.evicted_by(use.number)
            if known_bits:
                marks.append((size, cost))
            if having:
                holders = known.workers & ~evicted
                if known_bits:
                    holders = holders & ~known_bits | self._pending.at(digest) & known_bits
                if lacking := having & ~holders:
                    ends.append((lacking, cost, size, before))
                    having ^= lacking
            size += more
            cost += more * weight / (1.0 + (known.visits / _GROUP) ** 2)
        ends.append((having, cost, size, use))
        whole = cost + (prompt.size - size) * weight
        marks.append((size, cost))
        least = prompt.size * (self._settings.cache_threshold or 0.0)
        costs, seen = {}, {}
        for bits, had, matched, use in ends:
            if matched <= least:
                had, matched, use = 0.0, 0, None
            what = (matched, use)
            while bits:
                bit = bits & -bits
                bits ^= bit
                costs[bit] = whole - had
                seen[bit] = what
        known_costs: dict[int, float] = {}  # many workers have the same part of a prompt
        for bit, true in exact.items():
            matched = max(true, seen[bit][0])
            if matched <= least:
                matched = 0
            had = known_costs.get(matched, -1.0)
            if had < 0:
                had = known_costs[matched] = _cost_of(matched, marks, weight)
            costs[bit], seen[bit] = whole - had, (matched, None)
        return costs, seen

    def expects(self, exchange: Exchange) -> bool:
        """Return True when the choice for ``exchange`` relied on a belief."""
        return self._note in exchange.notes

    def answered(self, exchange: Exchange, prompt_tokens: int, cached_tokens: int) -> None:
        """Move the worker's horizon when it had clearly less of the prompt than was believed, for the third time.

        The horizon becomes the oldest last use of the three prefixes. One of them is no evidence: an engine evicts
        in the order of its own steps, and may have a prefix that was used before.
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
        """Forget what ``worker`` has in its cache. It keeps its turn among equal workers."""
        for choice in worker.choices:
            if (state := self._states.pop(choice.id, None)) is not None:
                self._horizons.drop(state.bit)
                state.bit = 0  # answers to earlier requests prove nothing now
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
        self._bits = 0


def _cheapest(
    workers: Sequence[Worker], states: Sequence[WorkerState], costs: Mapping[int, float], now: float
) -> int:
    """Return the place of the worker with the least cost; of equal ones, of the one chosen longest ago."""
    best, least, oldest = 0, inf, 0
    for place, (worker, state) in enumerate(zip(workers, states, strict=True)):
        cost = state.load(worker, now) + costs[state.bit]
        if cost < least or (cost == least and state.chosen < oldest):
            best, least, oldest = place, cost, state.chosen
    return best


def _exact(
    blocks: Blocks, body: bytes, most: int, workers: Sequence[Worker], states: Sequence[WorkerState]
) -> dict[int, int]:
    """Return the bytes of the prompt in ``body`` that a worker has, by its bit, for workers whose blocks are true.

    They are ``most`` at most.
    """
    places, true = [], []
    for place, worker in enumerate(workers):
        if (own := blocks.true_of(worker.id)) is not None:
            places.append(place)
            true.append(own)
    ids = PromptIds.of(body) if true else None
    if ids is None:
        return {}
    held = blocks.tokens_held(ids, true)
    per_token = ids.bytes_per_token()
    return {
        states[place].bit: min(most, int(tokens * per_token))
        for place, tokens in zip(places, held, strict=True)
    }


def _cost_of(size: int, marks: Sequence[tuple[int, float]], weight: float) -> float:
    """Return the cost of the first ``size`` bytes. ``marks``: bytes and costs of prefixes; ``weight``: beyond them."""
    place = bisect_left(marks, (size, 0.0))
    if place == 0:
        return 0.0
    before, cost = marks[place - 1]
    if place == len(marks):
        return cost + (size - before) * weight
    after, more = marks[place]
    return cost + (more - cost) * (size - before) / (after - before)
