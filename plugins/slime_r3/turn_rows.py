"""Rows of the tokens of recorded contexts, such as the experts that each token was routed to.

A *turn* is one response in a context, together with the prompt that it answers.
Row ``i`` of an answer has the experts that processed token ``i`` of its context. The token that was sampled last has
no row: the next turn processes it. So the rows of a turn begin where the rows of the previous turn end, and end before
the last token of its own response.

The *head* of a turn has the rows of the tokens before its response. The rows of the response are the turn's *own* rows.
Turns with the same prompt share equal heads. Different heads are kept apart: other weights, or another batch, route
differently. So a context has the rows of the turns that consumed and sampled its tokens. If a turn lacks rows, a later
turn with the same weight version and adapter fills the gap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from slime_r3 import reasons
from slime_r3.entries import Entry
from slime_r3.pieces import Part, Piece, StoredAs
from slime_r3.row_memory import RowMemory
from slime_r3.stretches import Stretch, stretches_of, version_of
from slime_sglang.token_arrays import IntArray

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn

__all__ = ["TurnRows"]


class TurnRows:
    """The rows of each turn, of one kind, such as routed experts. Rows of other kinds may share ``memory``. No I/O.

    With a store, ``on_stored(response, entry)`` is called when all rows of a turn are in the store. And
    ``forget_records(keys)`` is called for the records of rows that no turn needs any more.
    No method awaits, so tasks of one event loop need no lock. An entry is replaced as a whole, so any thread may call
    :meth:`find`.
    """

    def __init__(self, memory: RowMemory) -> None:
        self.memory = memory
        memory.kinds.append(self)
        self.size_bytes = 0
        self.stored_bytes = 0
        self.dropped = 0
        self.on_stored: Callable[[Hashable, Entry], None] = lambda response, entry: None
        self.forget_records: Callable[[Sequence[bytes]], None] = lambda keys: None
        self._entries: dict[Hashable, Entry] = {}
        #: Turns with rows in memory, oldest first, each with its age. ``add`` puts a turn before the turns that it
        #: continues.
        self._ages: OrderedDict[Hashable, int] = OrderedDict()
        self._heads: dict[Hashable, list[Piece]] = {}
        #: Pieces in the store, by their records: a restored piece may be a part of several turns.
        self._stored: dict[StoredAs, Piece] = {}
        self._reasons: dict[Hashable, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def known(self, turns: Sequence[ConsumedTurn]) -> int:
        """Return how many tokens at the beginning of the context have known rows, counted in whole turns. O(turns)."""
        known = 0
        for stretch in stretches_of(turns):
            if not self._is_complete(stretch):
                break
            known = stretch.end
        return known

    def miss(self, response: Hashable, reason: str) -> None:
        """Note why an answer brought no rows of ``response``. Known rows, or an earlier reason, stay."""
        if response not in self._entries:
            self._reasons.setdefault(response, reason)

    def add(self, turns: Sequence[ConsumedTurn], rows: IntArray, start: int) -> None:
        """Add ``rows``, ``[tokens, row size]``, of the last of ``turns``. The first row is that of token ``start``.

        Known rows stay. A gap of an earlier turn is filled only if the same weight version and adapter sampled both
        turns.
        """
        *before, new = stretches_of(turns)
        version = version_of(new.turn)
        for stretch in before:
            if not self._is_complete(stretch) and start < stretch.end:
                if stretch.turn.adapter != new.turn.adapter:
                    self.miss(stretch.turn.response, reasons.OTHER_ADAPTER)
                elif version is not None and version_of(stretch.turn) == version:
                    self._fill(stretch, rows, start)
                else:
                    self.miss(stretch.turn.response, reasons.OTHER_VERSION)
        self._fill(new, rows, start)
        for stretch in (new, *reversed(before)):
            if stretch.turn.response in self._ages:
                self._ages.move_to_end(stretch.turn.response)
                self._ages[stretch.turn.response] = self.memory.age()
        self.memory.make_room()

    def find(self, turns: Sequence[ConsumedTurn], count: int) -> list[Part] | str:
        """Return the first ``count`` rows of the context of ``turns``, or the reason why they are unknown. O(turns)."""
        if count <= 0:
            return []
        if len({turn.adapter for turn in turns}) > 1:
            return reasons.OTHER_ADAPTER  # the last turn's adapter has routed the earlier tokens differently
        parts: list[Part] = []
        for turn, place, end in stretches_of(turns):
            entry = self._entries.get(turn.response)
            if entry is None or not entry.has_own(end - turn.start):
                return self._reasons.get(turn.response, reasons.NOT_RECORDED)
            for piece in entry.pieces:
                length = min(piece.length, min(end, count) - place)
                if length > 0:
                    parts.append(Part(turn.response, piece, length, piece.rows))
                place += piece.length
            if end >= count:
                return parts
        return reasons.NOT_CONSUMED

    @contextmanager
    def held(self, parts: Sequence[Part]) -> Iterator[None]:
        """Keep the records of ``parts`` in the store within the ``with``, even if their turns are forgotten."""
        stored = [part.piece for part in parts if part.rows is None and part.piece.users]
        for piece in stored:
            piece.users += 1
        try:
            yield
        finally:
            self._release(stored)

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

    def drop(self, response: Hashable, reason: str) -> None:
        """Drop the rows of ``response``, for ``reason``."""
        self._remove(response)
        self._reasons[response] = reason
        self.dropped += 1

    # Room in memory.

    @property
    def oldest(self) -> float:
        """The age of the oldest turn with rows in memory; infinite without such a turn."""
        return next(iter(self._ages.values()), inf)

    def drop_oldest(self) -> None:
        """Drop the rows of the oldest turn with rows in memory."""
        self.drop(next(iter(self._ages)), reasons.DROPPED)

    def overdue(self, most_bytes: int, *, all_must_go: bool = False) -> list[Hashable]:
        """Return the turns whose rows should leave memory next, oldest first, with about ``most_bytes`` of rows in all.

        ``all_must_go``: rows should leave memory even if it has room for them.
        """
        found: list[Hashable] = []
        size = 0
        for response in self._ages:
            if size >= most_bytes or not (all_must_go or self.memory.exceeds(size)):
                break
            found.append(response)
            size += sum(piece.nbytes for piece in self.in_memory(response))
        return found

    def in_memory(self, response: Hashable) -> list[Piece]:
        """Return the pieces of ``response`` whose rows are in memory."""
        entry = self._entries.get(response)
        return [piece for piece in entry.pieces if piece.rows is not None] if entry is not None else []

    def note_stored(self, piece: Piece, records: StoredAs) -> None:
        """Note that the store has ``piece`` in ``records``; delete the records if no turn needs the piece any more."""
        if not piece.users:
            self.forget_records(records.keys)
            return
        if records.keys:
            self._stored[records] = piece
        self.size_bytes -= piece.nbytes
        self.stored_bytes += piece.nbytes
        piece.leave_memory(records)

    def leave(self, response: Hashable) -> None:
        """Note that the rows of ``response`` have left memory, unless further rows came meanwhile."""
        if not self.in_memory(response):
            self._ages.pop(response, None)
            entry = self._entries.get(response)
            if entry is not None:
                self.on_stored(response, entry)

    def drop_unstored(self, response: Hashable, reason: str) -> None:
        """Drop the rows of ``response`` if some of them are only in memory."""
        if self.in_memory(response):
            self.drop(response, reason)

    def lose(self, part: Part, reason: str) -> None:
        """Drop the rows of the turn of ``part``, since ``part`` is lost, unless other rows have replaced it."""
        entry = self._entries.get(part.response)
        if entry is not None and part.piece in entry.pieces:
            self.drop(part.response, reason)

    def restore(
        self, response: Hashable, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Take over the rows of ``response`` that a note describes, if the note has more rows than are known.

        ``content`` and ``records``: see Entry.note.
        """
        new, known = Entry.of_note(content, records, self._stored_piece), self._entries.get(response)
        if known is not None and known.length >= new.length:
            self._release(new.pieces)
            return
        self._entries[response] = new
        self._ages.pop(response, None)
        if known is not None:
            self._release(known.pieces)

    def _stored_piece(self, length: int, size: int, dtype: str, records: StoredAs) -> Piece:
        """Return the piece in ``records``, and count one more turn that uses it."""
        piece = self._stored.get(records)
        if piece is not None:
            piece.users += 1
            return piece
        piece = Piece.stored(length, size, dtype, records)
        self.stored_bytes += piece.nbytes
        if records.keys:
            self._stored[records] = piece
        return piece

    def _is_complete(self, stretch: Stretch) -> bool:
        entry = self._entries.get(stretch.turn.response)
        return entry is not None and entry.has_own(stretch.end - stretch.turn.start)

    def _fill(self, stretch: Stretch, rows: IntArray, start: int) -> None:
        """Add the rows of ``stretch`` that are not known; ``rows`` begin at ``start``."""
        turn, first, end = stretch
        entry = self._entries.get(turn.response, Entry(None, None))
        head, own, length = entry.head, entry.own, entry.own_length
        if head is None and start <= first:
            head = self._shared(stretch.key, rows[first - start : turn.start - start])
        if start <= turn.start and (own is None or length < end - turn.start):
            more = Piece(rows[turn.start + length - start : end - start].copy())
            self.size_bytes += more.nbytes
            own, length = (*(own or ()), more), length + more.length
        if head is None or own is None:
            self._reasons.setdefault(turn.response, reasons.STARTS_LATER)
        elif length >= turn.length - 1:
            self._reasons.pop(turn.response, None)
        if head is not None or own is not None:
            self._entries[turn.response] = Entry(head, own)
            self._ages.setdefault(turn.response, self.memory.age())

    def _shared(self, key: Hashable, rows: IntArray) -> Piece:
        """Return the head with ``rows``, and count one more turn that uses it."""
        alike = self._heads.setdefault(key, [])
        head = next((one for one in alike if one.equals(rows)), None)
        if head is not None:
            head.users += 1
            return head
        head = Piece(rows.copy(), key)
        alike.append(head)
        self.size_bytes += head.nbytes
        return head

    def _remove(self, response: Hashable) -> None:
        self._ages.pop(response, None)
        self._release(self._entries.pop(response).pieces)

    def _release(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            piece.users -= 1
            if not piece.users:
                self._free(piece)

    def _free(self, piece: Piece) -> None:
        if piece.rows is not None:
            self.size_bytes -= piece.nbytes
        else:
            self.stored_bytes -= piece.nbytes
            self._stored.pop(piece.records, None)
            self.forget_records(piece.records.keys)
        if piece.key is not None:
            alike = self._heads[piece.key]
            alike.remove(piece)
            if not alike:
                del self._heads[piece.key]
