"""Rows of the tokens of an answer: routed experts, and the choices of a sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pybase64

from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.index.segments import Context
from slime_sglang.answers import TOKEN_ARRAYS
from slime_sglang.token_arrays import IntArray, encoded

if TYPE_CHECKING:
    from slime_radix_cache.contracts import FoundRows

__all__ = ["INT32", "NPY", "ROWS", "RowNames", "Rows", "WantedRows", "find_rows"]

#: Forms of rows in JSON: SGLang's base64 of int32, and vLLM's base64 of a file in NumPy's format.
INT32, NPY = "int32", "npy"
#: The only inexact reason with which rows are still exact: a token without a logprob has its row.
_HARMLESS = "no_logprobs"


@dataclass(frozen=True, slots=True)
class RowNames:
    """The fields of an answer about rows. ``asked``: the field of a question that asks for them."""

    rows: str
    exact: str
    offsets: str

    @property
    def asked(self) -> str:
        return f"return_{self.rows}"


#: By the name of the field in ``meta_info`` in which engines send the rows.
ROWS = {
    name: RowNames(name, f"{short}_exact", f"{short}_offsets")
    for name, short in zip(TOKEN_ARRAYS, ("experts", "indexer"), strict=True)
}


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The names of the rows that an answer should have, and their ``form`` in JSON (INT32 or NPY)."""

    names: Sequence[str] = ()
    form: str = INT32


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``[token_length - 1, layers, top_k]``, or ``[token_length - 1, row size]`` if the shape is not known.

    ``rows`` is None if they are not exact; then ``reason`` says why. They are never padded. ``form``: see WantedRows.
    """

    name: str
    rows: IntArray | None
    reason: str | None
    form: str = INT32

    def about(self) -> dict[str, Any]:
        """Return the fields about the rows, ready for JSON."""
        return {
            ROWS[self.name].exact: self.rows is not None,
            f"{self.name}_reason": self.reason,
            f"{self.name}_shape": list(self.rows.shape) if self.rows is not None else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return :meth:`about` and the rows in base64. O(rows)."""
        return {**self.about(), self.name: self._text()}

    def _text(self) -> str | None:
        if self.rows is None:
            return None
        if self.form == INT32:
            return encoded(self.rows)
        file = BytesIO()
        np.save(file, self.rows, allow_pickle=False)
        return pybase64.b64encode_as_string(file.getbuffer())


@dataclass(frozen=True, slots=True)
class Found:
    """By name, the found ``rows`` of one context, or the reason why they are not known. ``form``: see WantedRows."""

    rows: Mapping[str, FoundRows | str]
    form: str

    async def read(self) -> tuple[Rows, ...]:
        """Return the rows. Raises HTTPError. O(rows)."""
        each: list[Rows] = []
        for name, found in self.rows.items():
            rows = found if isinstance(found, str) else await found.read()
            if isinstance(rows, str):
                each.append(Rows(name, None, rows, self.form))
            else:
                each.append(Rows(name, rows, None, self.form))
        return tuple(each)


def find_rows(
    recorder: RowRecorder, context: Context, tokens: int, reason: str | None, wanted: WantedRows
) -> Found:
    """Find the wanted rows of ``context``. Its record has ``tokens`` tokens, and ``reason`` as ``inexact_reason``."""
    if reason is not None and reason != _HARMLESS:
        return Found(dict.fromkeys(wanted.names, reason), wanted.form)
    return Found({name: recorder.find(name, context, tokens) for name in wanted.names}, wanted.form)
