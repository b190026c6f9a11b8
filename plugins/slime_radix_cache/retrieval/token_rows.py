"""Rows of the tokens of an answer: routed experts, and the choices of a sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.index.segments import Context
from slime_rows.rows import Rows
from slime_sglang.answers import TOKEN_ARRAYS

__all__ = ["INT32", "NPY", "ROWS", "RowNames", "WantedRows", "about_rows", "find_rows"]

#: Forms of rows in JSON: SGLang's base64 of int32, and vLLM's base64 of a file in NumPy's format.
INT32, NPY = "int32", "npy"
#: The only reason for inexact tokens that leaves their rows exact: a token without a logprob still has its row.
_HARMLESS = "no_logprobs"


@dataclass(frozen=True, slots=True)
class RowNames:
    """The names of an answer's fields about rows. ``asked``: the field of a request that asks for the rows."""

    rows: str
    exact: str
    offsets: str

    @property
    def asked(self) -> str:
        return f"return_{self.rows}"


#: The names for each kind of rows. The key is the field of ``meta_info`` in which engines send these rows.
ROWS = {
    name: RowNames(name, f"{short}_exact", f"{short}_offsets")
    for name, short in zip(TOKEN_ARRAYS, ("experts", "indexer"), strict=True)
}


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The names of the rows that an answer should have, and their ``form`` in JSON (INT32 or NPY)."""

    names: Sequence[str] = ()
    form: str = INT32


def about_rows(rows: Rows) -> dict[str, Any]:
    """Return the fields about ``rows``, ready for JSON."""
    return {
        ROWS[rows.name].exact: rows.found is not None,
        f"{rows.name}_reason": rows.reason,
        f"{rows.name}_shape": list(rows.found.shape) if rows.found is not None else None,
    }


def find_rows(
    recorder: RowRecorder, context: Context, tokens: int, reason: str | None, names: Sequence[str]
) -> tuple[Rows, ...]:
    """Find the rows ``names`` of ``context``. ``tokens``, ``reason``: the length and inexact reason of its record."""
    if reason is not None and reason != _HARMLESS:
        return tuple(Rows(name, None, reason) for name in names)
    return tuple(Rows.of(name, recorder.find(name, context, tokens)) for name in names)
