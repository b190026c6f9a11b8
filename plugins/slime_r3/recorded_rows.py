"""Recorded rows of one kind: routed experts, or the indexer's choices. Rows are checked before they are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_r3 import reasons
from slime_r3.cold_rows import ColdRows
from slime_r3.entries import Entry
from slime_r3.found_rows import FoundRows
from slime_r3.row_memory import RowMemory
from slime_r3.row_size import RowSize
from slime_r3.turn_rows import TurnRows
from slime_sglang.token_arrays import IntArray, array_in, may_be_recomputed

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn, RowNotes

__all__ = ["RecordedRows", "Shape"]

logger = logging.getLogger(__name__)

#: The number of layers, and the number of values that a token has in each layer.
Shape = tuple[int, int]


class RecordedRows:
    """The rows that answers have under ``name`` in ``meta_info``. ``shape`` returns the shape of a row, or None.

    Without a shape, two answers with different numbers of rows must agree on the size of a row: a truncated array may
    look like whole, smaller rows. Once an answer contradicts the first answer, all rows count as unknown.
    ``cure``: a hint how to set the shape. For TokenRows see slime_radix_cache.contracts.
    """

    def __init__(
        self, name: str, memory: RowMemory, shape: Callable[[], Shape | None], cure: str = ""
    ) -> None:
        self.turns = TurnRows(memory)
        self.cold = ColdRows(self.turns)
        self.misses: dict[str, int] = {}
        #: The number of rows recorded so far, from all answers.
        self.rows_recorded = 0
        self._name = name
        self._shape = shape
        self._cure = cure
        #: The size of a row, according to the answers that came while the shape was not known.
        self._size = RowSize()
        self._notes: RowNotes | None = None
        self._noted = RowSize()

    def note_in(self, notes: RowNotes) -> None:
        """From now on, note in ``notes`` which rows are put into the store, and what is known of the size of a row."""

        def add(response: Hashable, entry: Entry) -> None:
            notes.add(response, self._name, *entry.note())

        self._notes, self.turns.on_stored = notes, add
        self.cold.drop_noted = notes.drop

    def restore(
        self, response: Hashable, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Take over what an earlier run or another router has noted. See TokenRows."""
        if response is not None:
            self.turns.restore(response, content, records)
        elif self._shape() is None:
            self._size = self._size.with_answers(RowSize(*content))

    def _note_size(self) -> None:
        """Note what is known of the size of a row, if that has changed since the last note."""
        if self._notes is None:
            return
        shape = self._shape()
        size = RowSize(shape[0] * shape[1], 0, True, False, shape[0]) if shape is not None else self._size
        if size != self._noted and size.size is not None:  # an answer without rows has no size to note
            self._noted = size
            self._notes.add(None, self._name, size, ())

    def known(self, turns: Sequence[ConsumedTurn]) -> int:
        """Return how many tokens at the beginning of the context have known rows; 0 if a row's size is in doubt."""
        self._drop_contradicted()
        return 0 if self._doubt() is not None else self.turns.known(turns)

    def record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        """Record the rows in ``meta``. See TokenRows."""
        self._drop_contradicted()
        self._record(turns, meta, start)
        self._note_size()

    def _record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        new = turns[-1]
        value, told = meta.get(self._name), meta.get(f"{self._name}_start_len")
        end = new.start + new.length - 1
        if value is None or (value == "" and told != end):
            self._miss(new, reasons.NOT_TOLD)
            return
        if may_be_recomputed(meta, {version for version, _ in new.versions}):
            self._miss(new, reasons.OTHER_VERSION)
            return
        try:
            found = self._matrix(value, end, told, start)
        except ValueError as error:
            if self._miss(new, reasons.MIS_SIZED):
                logger.error(
                    "%s of an answer are not recorded: %s (further such answers are only counted)",
                    self._name,
                    error,
                )
            return
        layers = meta.get(f"{self._name}_num_layers")
        if type(layers) is int and layers > 0:
            self._size = self._size._replace(layers=layers)
        self.rows_recorded += len(found[0])
        self.turns.add(turns, *found)

    def find(self, turns: Sequence[ConsumedTurn], tokens: int) -> FoundRows | str:
        """Return the rows of the first ``tokens - 1`` tokens, or the reason why they are not known. See TokenRows."""
        doubt = self._doubt()
        if doubt == reasons.SIZES_DISAGREE:
            return doubt
        parts = self.turns.find(turns, tokens - 1)
        if isinstance(parts, str):
            return parts
        shape = self._shape()
        if not parts:
            return FoundRows(
                (0, *(shape if shape is not None else (0,))), parts, self.turns, self.cold.reader
            )
        if doubt is not None:
            return doubt
        size, layers = self._known_size(), self._size.layers
        if size is None or any(part.piece.size != size for part in parts):
            return reasons.MIS_SIZED
        if shape is None and layers is not None and not size % layers:
            shape = layers, size // layers
        return FoundRows(
            (tokens - 1, *(shape if shape is not None else (size,))), parts, self.turns, self.cold.reader
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the size and the counters, ready for JSON."""
        return {
            "turns": len(self.turns),
            "bytes": self.turns.size_bytes,
            "stored_bytes": self.turns.stored_bytes,
            "dropped": self.turns.dropped,
            "missing": dict(self.misses),
        }

    def _matrix(self, value: Any, end: int, told: Any, asked: int) -> tuple[IntArray, int]:
        """Return the rows in ``value``, whose last row is of token ``end - 1``, and the token of their first row.

        Tokens are given by their place in the context. ``told``: the token of the first row according to the answer, if
        the answer has it. ``asked``: the token that the request names; older engines ignore it. Raises ValueError.
        """
        array = array_in(value)
        if array is None:
            raise ValueError(f"wanted base64, got {type(value).__name__}")
        values = array.values
        size = self._known_size()
        if type(told) is int:
            start = told
        elif not asked or (size is not None and len(values) == (end - asked) * size):
            start = asked
        elif size is not None and len(values) == end * size:
            start = 0
        else:
            raise ValueError(
                f"the answer does not say at which token the rows begin; the request asked for rows from {asked} on"
            )
        count = end - start
        if start < 0 or count < 0 or bool(count) != bool(len(values)) or (count and len(values) % count):
            raise ValueError(f"wanted {count} rows of one size, got {len(values)} values")
        if not count:
            return values.reshape(0, size or 1), start
        self._check_size(len(values) // count, count)
        return values.reshape(count, -1), start

    def _known_size(self) -> int | None:
        """Return the size of a row; None if it is not known for sure."""
        shape = self._shape()
        if shape is not None:
            return shape[0] * shape[1]
        return self._size.size if self._size.is_confirmed else None

    def _check_size(self, size: int, count: int) -> None:
        """Raise ValueError unless ``size`` is a row's size by the shape or, without a shape, by the first answer.

        ``count``: the number of rows in the answer.
        """
        known = self._known_size()
        if self._shape() is None:
            self._size = self._size.with_answer(size, count)
            known = self._size.size
        if size != known:
            raise ValueError(f"wanted rows of {known} values, got {size}{self._cure}")

    def _doubt(self) -> str | None:
        """Return the reason to doubt the size of a row, or None."""
        return self._size.doubt if self._shape() is None else None

    def _drop_contradicted(self) -> None:
        """If the shape is known, drop the rows that were recorded before it was, unless their size fits the shape."""
        shape = self._shape()
        if shape is not None and self._size.size is not None:
            if self._size.size != shape[0] * shape[1]:
                self.turns.clear(reasons.MIS_SIZED)
            self._size = RowSize(layers=self._size.layers)

    def _miss(self, turn: ConsumedTurn, reason: str) -> bool:
        """Note why there are no rows for ``turn``. Return True for the first turn with this ``reason``."""
        self.turns.miss(turn.response, reason)
        self.misses[reason] = self.misses.get(reason, 0) + 1
        return self.misses[reason] == 1

    def forget(self, response: Hashable) -> None:
        """Drop the rows of ``response``."""
        self.turns.forget(response)
