"""The known rows of one turn, and the note about them in the log of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from slime_r3.pieces import Piece, StoredAs

__all__ = ["Entry"]

#: A piece in a note: its number of records, the rows in a record, its number of rows, the size of a row, and the type.
_Told = tuple[int, int, int, int, str]
#: The head, and the pieces of the turn's own rows, see Entry.
_Content = tuple[_Told | None, tuple[_Told, ...] | None]


class Entry(NamedTuple):
    """The known rows of one turn, see ``turn_rows``. ``head``: the rows of the turn's tokens before its response.

    ``own``: the rows of the response, in pieces; the last rows may be missing. A field is None if no answer had its
    rows.
    """

    head: Piece | None
    own: tuple[Piece, ...] | None

    @classmethod
    def of_note(
        cls, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]], piece_of: Callable[..., Piece]
    ) -> Self:
        """Return the entry for which :meth:`note` returned ``content`` and ``records``.

        ``piece_of`` makes a piece from the parameters of Piece.stored.
        """
        head, own = content
        keys: Iterator[bytes] = (key for key, _ in records)

        def piece(told: _Told) -> Piece:
            number, rows, length, size, dtype = told
            return piece_of(length, size, dtype, StoredAs(tuple(next(keys) for _ in range(number)), rows))

        first = piece(head) if head is not None else None
        return cls(first, tuple(map(piece, own)) if own is not None else None)

    def note(self) -> tuple[_Content, list[tuple[bytes, int]]]:
        """Return the last two arguments of RowNotes.add: the content of a note about all rows, and their records.

        All rows must be in the store.
        """
        head = _told(self.head) if self.head is not None else None
        own = tuple(map(_told, self.own)) if self.own is not None else None
        return (head, own), [record for piece in self.pieces for record in piece.record_sizes]

    @property
    def length(self) -> int:
        """Number of known rows."""
        return sum(piece.length for piece in self.pieces)

    @property
    def own_length(self) -> int:
        return sum(piece.length for piece in self.own or ())

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*((self.head,) if self.head is not None else ()), *(self.own or ()))

    def has_own(self, length: int) -> bool:
        """Return True if the head and the first ``length`` own rows are known."""
        return self.head is not None and self.own is not None and self.own_length >= length


def _told(piece: Piece) -> _Told:
    return len(piece.records.keys), piece.records.rows, piece.length, piece.size, piece.dtype.str
