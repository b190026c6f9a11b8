"""Rows of the tokens of an answer: routed experts, and the choices of a sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.index.segments import Context
from slime_sglang.answers import TOKEN_ARRAYS

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


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows ``[token_length - 1, layers, top_k]``, or ``[token_length - 1, row size]`` if the shape is not known.

    ``found`` is None if they are not exact; then ``reason`` says why. They are never padded, and read only when they
    are sent. ``form``: see WantedRows.
    """

    name: str
    found: FoundRows | None
    reason: str | None
    form: str = INT32

    def about(self) -> dict[str, Any]:
        """Return the fields about the rows, ready for JSON."""
        return {
            ROWS[self.name].exact: self.found is not None,
            f"{self.name}_reason": self.reason,
            f"{self.name}_shape": list(self.found.shape) if self.found is not None else None,
        }


def find_rows(
    recorder: RowRecorder, context: Context, tokens: int, reason: str | None, wanted: WantedRows
) -> tuple[Rows, ...]:
    """Find the wanted rows of ``context``. Its record has ``tokens`` tokens, and ``reason`` as ``inexact_reason``."""
    if reason is not None and reason != _HARMLESS:
        return tuple(Rows(name, None, reason, wanted.form) for name in wanted.names)
    return tuple(
        Rows(name, None, found, wanted.form)
        if isinstance(found, str)
        else Rows(name, found, None, wanted.form)
        for name in wanted.names
        for found in (recorder.find(name, context, tokens),)
    )
