"""The size of a row according to answers, while no flag and no worker says the shape of a row."""

from __future__ import annotations

from typing import NamedTuple

from slime_r3 import reasons

__all__ = ["RowSize"]


class RowSize(NamedTuple):
    """``size``: values in a row of the first answer, which had ``first_rows`` rows; None before the first answer.

    ``is_confirmed``: an answer with another number of rows agrees. ``is_contradicted``: an answer disagrees.
    ``layers``: the number of layers, if an answer had it.
    """

    size: int | None = None
    first_rows: int = 0
    is_confirmed: bool = False
    is_contradicted: bool = False
    layers: int | None = None

    def with_answer(self, size: int, count: int) -> RowSize:
        """Return the RowSize after a further answer, of ``count`` rows of ``size`` values."""
        if self.size is None:
            return self._replace(size=size, first_rows=count)
        confirms = size == self.size and count != self.first_rows
        return self._replace(
            is_confirmed=self.is_confirmed or confirms,
            is_contradicted=self.is_contradicted or size != self.size,
        )

    def with_answers(self, other: RowSize) -> RowSize:
        """Return the RowSize after the answers of both this RowSize and ``other``."""
        if other.size is None:  # no answer had rows
            return self._replace(layers=self.layers or other.layers)
        if self.size is None:
            return other._replace(layers=self.layers or other.layers)
        both = self.with_answer(other.size, other.first_rows)
        return both._replace(
            is_confirmed=both.is_confirmed or other.is_confirmed,
            is_contradicted=both.is_contradicted or other.is_contradicted,
            layers=self.layers or other.layers,
        )

    @property
    def doubt(self) -> str | None:
        """The reason to doubt the size, or None."""
        if self.is_contradicted:
            return reasons.SIZES_DISAGREE
        return None if self.is_confirmed else reasons.SHAPE_UNKNOWN
