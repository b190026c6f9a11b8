"""Groups of workers that have the same part of a prompt, and the choice of the cheapest of all workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from operator import add
from typing import NamedTuple

from router_core import Worker
from slime_policies.kv_events import Blocks
from slime_policies.kv_events.prompt_ids import PromptIds
from slime_policies.prefixes import Use
from slime_policies.worker_state import REQUEST, WorkerState

__all__ = ["Match", "Offered", "cheapest", "cost_of", "exact_sizes", "match_of", "without"]


class Match(NamedTuple):
    """Workers, as ``bits``, that have the first ``size`` bytes of a prompt and no more.

    ``cost``: the cost of the part that they lack, in tokens. ``use``: the last use of the part that they have, or None
    if they have no part or its last use is unknown.
    """

    bits: int
    cost: float
    size: int
    use: Use | None


class Offered(NamedTuple):
    """The workers of a choice, and the state of each.

    ``bits``: the bits of all workers. ``places``: by the bit of a worker, its place (index) in ``workers``.
    """

    workers: Sequence[Worker]
    states: list[WorkerState]
    bits: int
    places: dict[int, int]

    @classmethod
    def of(cls, workers: Sequence[Worker], states: list[WorkerState]) -> Offered:
        """Return the workers of a choice with their bits. ``states``: the state of each of ``workers``."""
        places = {state.bit: place for place, state in enumerate(states)}
        return cls(workers[:], states, sum(places), places)


def match_of(bit: int, matches: Sequence[Match]) -> Match:
    """Return the match of the worker ``bit``, which is in one of ``matches``."""
    return next(match for match in matches if match.bits & bit)


def without(bits: int, matches: Sequence[Match]) -> list[Match]:
    """Return ``matches`` without the workers whose bits are in ``bits``."""
    return [match._replace(bits=left) for match in matches if (left := match.bits & ~bits)]


def cheapest(offered: Offered, matches: Sequence[Match], now: float, further: Sequence[float] = ()) -> int:
    """Return the place of the worker with the least cost; of equal workers, the place of the one chosen longest ago.

    ``further``: a further cost of each worker, in tokens.
    """
    states, places = offered.states, offered.places
    totals = [
        state.load(worker, now) if state.waiting else REQUEST * (worker.in_flight + state.more)
        for worker, state in zip(offered.workers, states, strict=True)
    ]
    if len(matches) > 1:
        usual = max(matches, key=_count).cost  # the cost of the largest group is left out for all workers
        for bits, cost, _, _ in matches:
            if cost != usual:
                more = cost - usual
                while bits:
                    bit = bits & -bits
                    bits ^= bit
                    totals[places[bit]] += more
    if further:
        totals = [*map(add, totals, further)]
    least = min(totals)
    if totals.count(least) == 1:
        return totals.index(least)
    turns = [state.chosen if total == least else inf for total, state in zip(totals, states, strict=True)]
    return turns.index(min(turns))


def _count(match: Match) -> int:
    return match.bits.bit_count()


def exact_sizes(blocks: Blocks, body: bytes, most: int, offered: Offered) -> dict[int, int]:
    """Return, for each worker whose blocks are in sync, its bit and the bytes of the prompt that it has.

    The prompt is read from ``body``. The bytes are at most ``most``. The result is empty if the prompt is not given as
    ids.
    """
    places, in_sync = [], []
    for place, worker in enumerate(offered.workers):
        if (own := blocks.in_sync(worker.id)) is not None:
            places.append(place)
            in_sync.append(own)
    ids = PromptIds.of(body) if in_sync else None
    if ids is None:
        return {}
    held = blocks.tokens_held(ids, in_sync)
    per_token = ids.bytes_per_token()
    return {
        offered.states[place].bit: min(most, int(tokens * per_token))
        for place, tokens in zip(places, held, strict=True)
    }


def cost_of(size: int, marks: Sequence[tuple[int, float]], weight: float) -> float:
    """Return the cost of the first ``size`` bytes, from ``marks``: the bytes and costs of some prefixes.

    ``weight``: the cost of each byte after the last mark.
    """
    place = bisect_left(marks, (size, 0.0))
    if place == 0:
        return 0.0
    before, cost = marks[place - 1]
    if place == len(marks):
        return cost + (size - before) * weight
    after, more = marks[place]
    return cost + (more - cost) * (size - before) / (after - before)
