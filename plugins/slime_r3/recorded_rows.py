"""Recorded rows of one kind: routed experts, or the indexer's choices. Each answer is checked before it is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_r3 import reasons
from slime_r3.turn_rows import TurnRows
from slime_sglang.token_arrays import IntArray, array_in

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn

__all__ = ["RecordedRows", "Shape"]

logger = logging.getLogger(__name__)

#: Layers, and values of a token in each.
Shape = tuple[int, int]


class RecordedRows:
    """The rows that answers have under ``name`` in ``meta_info``. ``shape`` returns the shape of a row, or None.

    Without a shape, the first answer tells the size of a row. When another answer contradicts it, neither is
    believed any more. ``cure``: a hint how to set the shape.
    """

    def __init__(self, name: str, max_bytes: int, shape: Callable[[], Shape | None], cure: str = "") -> None:
        self.turns = TurnRows(max_bytes)
        self.misses: dict[str, int] = {}
        self._name = name
        self._shape = shape
        self._cure = cure
        self._size: int | None = None
        self._layers: int | None = None
        self._sizes_disagree = False

    def known(self, turns: Sequence[ConsumedTurn]) -> int:
        """Return the number of first tokens of the context of ``turns`` whose rows are all known."""
        return 0 if self._is_disputed() else self.turns.known(turns)

    def record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        """Record the rows in ``meta``. See TokenRows."""
        new = turns[-1]
        value, told = meta.get(self._name), meta.get(f"{self._name}_start_len")
        end = new.start + new.length - 1
        if value is None or (value == "" and told != end):
            self._miss(new, reasons.NOT_TOLD)
            return
        try:
            found = self._matrix(value, end, told, start)
        except ValueError as error:
            if self._miss(new, reasons.MIS_SIZED):
                logger.error(
                    "%s of an answer are not recorded: %s (further ones are only counted)", self._name, error
                )
            return
        layers = meta.get(f"{self._name}_num_layers")
        self._layers = layers if type(layers) is int and layers > 0 else self._layers
        self.turns.add(turns, *found)

    def read(self, turns: Sequence[ConsumedTurn], tokens: int) -> IntArray | str:
        """Return the rows of the first ``tokens - 1`` tokens, or the reason why not. See TokenRows."""
        if self._is_disputed():
            return reasons.SIZES_DISAGREE
        rows = self.turns.read(turns, tokens - 1)
        if isinstance(rows, str):
            return rows
        size, shape = rows.shape[1], self._shape()
        if shape is None and self._layers is not None:
            shape = self._layers, size // self._layers
        fits = shape is not None and shape[0] * shape[1] == size
        return rows.reshape(-1, *shape) if shape is not None and fits else rows

    def as_dict(self) -> dict[str, Any]:
        """Return the size and the counters, ready for JSON."""
        return {
            "turns": len(self.turns),
            "bytes": self.turns.size_bytes,
            "dropped": self.turns.dropped,
            "missing": dict(self.misses),
        }

    def _matrix(self, value: Any, end: int, told: Any, asked: int) -> tuple[IntArray, int]:
        """Return the rows in ``value``, which end before token ``end``, and the place of the first. Raises ValueError.

        ``told``, ``asked``: the first token by the answer and by the request. Older engines ignore ``asked``.
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
                f"the answer does not say at which token the rows begin, though {asked} was asked for"
            )
        count = end - start
        if start < 0 or count < 0 or bool(count) != bool(len(values)) or (count and len(values) % count):
            raise ValueError(f"wanted {count} rows of one size, got {len(values)} values")
        if not count:
            return values.reshape(0, size or 1), start
        self._check_size(len(values) // count)
        return values.reshape(count, -1), start

    def _known_size(self) -> int | None:
        shape = self._shape()
        return shape[0] * shape[1] if shape is not None else self._size

    def _check_size(self, size: int) -> None:
        """Raise ValueError if rows must not have ``size`` values."""
        known = self._known_size()
        if known is None:
            self._size = size
        elif size != known:
            if self._shape() is None:
                self._sizes_disagree = True
            raise ValueError(f"wanted rows of {known} values, got {size}{self._cure}")

    def _is_disputed(self) -> bool:
        return self._sizes_disagree and self._shape() is None

    def _miss(self, turn: ConsumedTurn, reason: str) -> bool:
        """Note why there are no rows for ``turn``. Return True for the first such turn."""
        self.turns.miss(turn.response, reason)
        self.misses[reason] = self.misses.get(reason, 0) + 1
        return self.misses[reason] == 1

    def forget(self, response: Hashable) -> None:
        """Drop the rows of ``response``."""
        self.turns.forget(response)
