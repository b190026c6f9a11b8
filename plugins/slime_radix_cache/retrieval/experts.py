"""Routed experts of the tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pybase64

from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.index.segments import Context
from slime_sglang.token_arrays import IntArray, encoded

__all__ = ["EXPERTS", "INT32", "NPY", "Experts", "experts_of"]

EXPERTS = "routed_experts"
#: Forms of the field in JSON: SGLang's base64 of int32, and vLLM's base64 of a file in NumPy's format.
INT32, NPY = "int32", "npy"
#: Without a logprob a token's experts are still known.
_HARMLESS = "no_logprobs"


@dataclass(frozen=True, slots=True)
class Experts:
    """Rows ``[token_length - 1, layers, top_k]``, or ``[token_length - 1, row size]`` if the shape is not known.

    ``rows`` is None if they are not exact; then ``reason`` says why. They are never padded. ``form``: that in JSON.
    """

    rows: IntArray | None
    reason: str | None
    form: str = INT32

    def about(self) -> dict[str, Any]:
        """Return the fields about the rows, ready for JSON."""
        return {
            "experts_exact": self.rows is not None,
            "routed_experts_reason": self.reason,
            "routed_experts_shape": list(self.rows.shape) if self.rows is not None else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return :meth:`about` and the rows in base64. O(rows)."""
        return {**self.about(), EXPERTS: self._text()}

    def _text(self) -> str | None:
        if self.rows is None:
            return None
        if self.form == INT32:
            return encoded(self.rows)
        file = BytesIO()
        np.save(file, self.rows, allow_pickle=False)
        return pybase64.b64encode_as_string(file.getbuffer())


def experts_of(
    rows: RowRecorder, context: Context, tokens: int, reason: str | None, form: str = INT32
) -> Experts:
    """Return the experts of ``context``, whose record has ``tokens`` tokens and the ``inexact_reason`` ``reason``."""
    if reason is not None and reason != _HARMLESS:
        return Experts(None, reason, form)
    found = rows.read(EXPERTS, context, tokens)
    return Experts(None, found, form) if isinstance(found, str) else Experts(found, None, form)
