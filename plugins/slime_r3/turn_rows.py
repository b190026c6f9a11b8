"""Rows of the tokens of recorded contexts, such as the experts that each token was routed to.

Row ``i`` of an answer belongs to token ``i`` of its context: the experts that processed this token. The token that was
sampled last has no row: the next turn processes it. So the rows of a turn begin where those of the turn before it end,
and end before the last token of its own response.

The *head* of a turn is its rows up to its response, the others are its *own*. Turns with the same prompt share equal
heads. Different heads are kept apart: other weights, or another batch, route differently. So a context has the rows of
the turns that consumed and sampled its tokens. Gaps are filled by later turns with the same weight version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slime_r3 import reasons
from slime_sglang.token_arrays import IntArray

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn

__all__ = ["TurnRows"]


@dataclass(slots=True, eq=False)
class _Head:
    """Rows that ``users`` turns with the same prompt (``key``) share."""

    key: Hashable
    rows: IntArray
    users: int = 0


class _Entry(NamedTuple):
    """Rows of one turn, ``[tokens, row size]``. ``own`` may lack rows at its end, if no answer told them."""

    head: _Head | None
    own: IntArray | None


class _Stretch(NamedTuple):
    """A turn, and the places at which its rows begin and end in its context."""

    turn: ConsumedTurn
    first: int
    end: int

    @property
    def key(self) -> Hashable:
        return self.turn.prompt, self.first


class TurnRows:
    """Rows by turn, at most ``max_bytes`` of them (0: no limit). The oldest are dropped first.

    Changes have no ``await``, and an entry is replaced as a whole: any thread may read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self.dropped = 0
        self._max_bytes = max_bytes
        #: Oldest first; ``add`` puts a turn before those that it continues.
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._heads: dict[Hashable, list[_Head]] = {}
        self._reasons: dict[Hashable, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def known(self, turns: Sequence[ConsumedTurn]) -> int:
        """Return the number of first tokens of the context of ``turns`` whose rows are all known. O(turns)."""
        known = 0
        for stretch in _stretches(turns):
            if not self._is_complete(stretch):
                break
            known = stretch.end
        return known

    def miss(self, response: Hashable, reason: str) -> None:
        """Note why an answer brought no rows of ``response``."""
        if response not in self._entries:
            self._reasons.setdefault(response, reason)

    def add(self, turns: Sequence[ConsumedTurn], rows: IntArray, start: int) -> None:
        """Add ``rows`` of the answer that is the last of ``turns``: ``[tokens, row size]``, from token ``start`` on.

        Known rows stay. Gaps of earlier turns are filled only if one weight version and adapter sampled both.
        """
        *before, new = _stretches(turns)
        version = _version_of(new.turn)
        for stretch in before:
            if not self._is_complete(stretch) and start < stretch.end:
                if stretch.turn.adapter != new.turn.adapter:
                    self.miss(stretch.turn.response, reasons.OTHER_ADAPTER)
                elif version is not None and _version_of(stretch.turn) == version:
                    self._fill(stretch, rows, start)
                else:
                    self.miss(stretch.turn.response, reasons.OTHER_VERSION)
        self._fill(new, rows, start)
        for stretch in (new, *reversed(before)):
            if stretch.turn.response in self._entries:
                self._entries.move_to_end(stretch.turn.response)
        while self._max_bytes and self.size_bytes > self._max_bytes:
            oldest = next(iter(self._entries))
            self._remove(oldest)
            self._reasons[oldest] = reasons.DROPPED
            self.dropped += 1

    def read(self, turns: Sequence[ConsumedTurn], count: int) -> IntArray | str:
        """Return the rows of the first ``count`` tokens of the context of ``turns``, or the reason why not. O(rows)."""
        if count <= 0:
            return np.empty((0, 0), np.uint8)
        if len({turn.adapter for turn in turns}) > 1:
            return reasons.OTHER_ADAPTER  # the last turn was sampled after another routing of the others
        parts: list[IntArray] = []
        known = 0
        for stretch in _stretches(turns):
            entry = self._entries.get(stretch.turn.response)
            own = stretch.end - stretch.turn.start
            if entry is None or entry.head is None or entry.own is None or len(entry.own) < own:
                return self._reasons.get(stretch.turn.response, reasons.NOT_RECORDED)
            parts += [part for part in (entry.head.rows, entry.own[:own]) if len(part)]
            known = stretch.end
            if known >= count:
                return np.concatenate(parts)[:count]
        return reasons.NOT_CONSUMED

    def clear(self, reason: str) -> None:
        """Drop all rows, for ``reason``."""
        for response in list(self._entries):
            self._remove(response)
            self._reasons[response] = reason

    def forget(self, response: Hashable) -> None:
        """Drop all that is known of ``response``."""
        self._reasons.pop(response, None)
        if response in self._entries:
            self._remove(response)

    def _is_complete(self, stretch: _Stretch) -> bool:
        entry = self._entries.get(stretch.turn.response)
        if entry is None or entry.head is None or entry.own is None:
            return False
        return len(entry.own) >= stretch.end - stretch.turn.start

    def _fill(self, stretch: _Stretch, rows: IntArray, start: int) -> None:
        """Add the rows of ``stretch`` that are not known; ``rows`` begin at ``start``."""
        turn, first, end = stretch
        head, own = self._entries.get(turn.response, _Entry(None, None))
        if head is None and start <= first:
            head = self._shared(stretch.key, rows[first - start : turn.start - start])
        if start <= turn.start and (own is None or len(own) < end - turn.start):
            told = rows[turn.start - start : end - start]
            more = told.copy() if own is None or not len(own) else np.concatenate([own, told[len(own) :]])
            self.size_bytes += more.nbytes - (own.nbytes if own is not None else 0)
            own = more
        if head is None or own is None:
            self._reasons.setdefault(turn.response, reasons.STARTS_LATER)
        elif len(own) >= turn.length - 1:
            self._reasons.pop(turn.response, None)
        if head is not None or own is not None:
            self._entries[turn.response] = _Entry(head, own)

    def _shared(self, key: Hashable, rows: IntArray) -> _Head:
        """Return the head with ``rows``, for one more turn."""
        alike = self._heads.setdefault(key, [])
        head = next((one for one in alike if _equal(one.rows, rows)), None)
        if head is None:
            head = _Head(key, rows.copy())
            alike.append(head)
            self.size_bytes += head.rows.nbytes
        head.users += 1
        return head

    def _remove(self, response: Hashable) -> None:
        head, own = self._entries.pop(response)
        if own is not None:
            self.size_bytes -= own.nbytes
        if head is None:
            return
        head.users -= 1
        if not head.users:
            self.size_bytes -= head.rows.nbytes
            alike = self._heads[head.key]
            alike.remove(head)
            if not alike:
                del self._heads[head.key]


def _equal(rows: IntArray, others: IntArray) -> bool:
    """Return True if both have the same shape and values. Fast if they have the same type."""
    if rows.dtype != others.dtype or rows.nbytes % 8:
        return np.array_equal(rows, others)
    # Eight bytes at once, since the comparison makes an array of its results.
    return rows.shape == others.shape and np.array_equal(
        rows.reshape(-1).view(np.uint64), others.reshape(-1).view(np.uint64)
    )


def _stretches(turns: Sequence[ConsumedTurn]) -> Iterator[_Stretch]:
    """Yield the stretch of each turn. The context may keep only a part of a response."""
    first = 0
    for turn in turns:
        end = turn.start + min(turn.kept, turn.length - 1)
        yield _Stretch(turn, first, end)
        first = end


def _version_of(turn: ConsumedTurn) -> str | None:
    """Return the weight version that sampled all tokens of ``turn``; None if there are several, or it is unknown."""
    names = {version for version, _ in turn.versions}
    return names.pop() if len(names) == 1 else None
