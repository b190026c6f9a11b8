"""Reading of an engine's answer from SGLang's JSON. In the answer of an aborted generation any key may be missing."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from slime_radix_cache.index.segments import Versions
from slime_sglang.evidence import Columns, columns_of

__all__ = ["NOTHING_SAMPLED", "Output", "Unusable", "pack_logprobs", "read_output"]

#: ``Unusable.kind`` of an answer that has no tokens and does not claim to have any.
NOTHING_SAMPLED = "nothing_sampled"


class Unusable(Exception):
    """An answer that cannot be recorded. ``kind``: the reason, for counting."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Output(NamedTuple):
    """One sampled sequence. ``ids`` and ``logprobs`` are packed (see :class:`Response`); ``ids`` is not empty.

    ``logprobs`` is None if the engine sent no logprobs, or logprobs of other ids, or a value that is neither a
    number nor null. The version in ``versions`` is None if the engine sent none, or spans that do not cover the ids
    exactly. The function :func:`slime_sglang.contradiction` reports such wrong values. ``finish_reason``: the JSON
    of ``reason``. ``columns``: the columns of ``output_token_logprobs``, or None.
    """

    text: str
    ids: bytes
    logprobs: bytes | None
    versions: Versions
    reason: Any
    finish_reason: str
    columns: Columns | None


def read_output(output: Any) -> Output:
    """Read ``output``, one parsed object of a ``/generate`` answer. Raises Unusable."""
    if not isinstance(output, dict):
        raise Unusable("answer_not_understood")
    meta = output.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    text = output.get("text")
    triples = meta.get("output_token_logprobs")
    columns = columns_of(triples) if triples else None
    try:
        ids, logprobs = _tokens(output.get("output_ids"), triples, columns)
    except (TypeError, ValueError, OverflowError, IndexError):
        raise Unusable("answer_not_understood") from None
    if not ids:
        claims_some = meta.get("completion_tokens", 0) != 0 or bool(text or triples)
        raise Unusable("answer_without_ids" if claims_some else NOTHING_SAMPLED)
    if not isinstance(text, str):
        raise Unusable("answer_without_text")
    reason = meta.get("finish_reason")
    return Output(
        text,
        ids,
        logprobs,
        _versions(meta, len(ids) // 4),
        reason,
        sys.intern(orjson.dumps(reason).decode()),
        columns,
    )


def _tokens(ids: Any, triples: Any, columns: Columns | None) -> tuple[bytes, bytes | None]:
    """Return packed ids and logprobs. ``ids``: ``output_ids``. ``triples``: ``[logprob, id, text]`` of each token."""
    if ids is None:
        ids = columns.ids if columns is not None else [triple[1] for triple in triples or ()]
    packed = array("i", ids).tobytes()
    if columns is None or columns.ids != ids:
        return packed, None  # no logprobs, or logprobs of other tokens
    try:
        return packed, pack_logprobs(columns.logprobs)
    except TypeError:
        return packed, None  # a value is not a number


def pack_logprobs(values: Sequence[float | None]) -> bytes:
    """Pack ``values`` without loss: as float32 if all of them fit exactly, else as float64. None becomes NaN.

    Engines compute logprobs in float32, so float32 is the usual case. Raises TypeError if a value is no number, and
    OverflowError if an integer is too large for a float.
    """
    try:
        floats = array("f", values)  # type: ignore[type-var]  # None raises
        if floats.tolist() == values:
            return floats.tobytes()
    except (TypeError, OverflowError):
        pass  # None, or an integer that is too large for a float
    exact = array("d", [math.nan if value is None else value for value in values])
    with np.errstate(over="ignore", invalid="ignore"):  # a value too large for float32 fails the comparison
        narrow = np.frombuffer(exact).astype(np.float32)
    wide = exact.tobytes()
    return narrow.tobytes() if narrow.astype(np.float64).tobytes() == wide else wide


def _versions(meta: dict[str, Any], count: int) -> Versions:
    """Return the versions of ``count`` tokens, from spans or from one version for all.

    The version is None if the spans do not cover the tokens exactly.
    """
    spans = meta.get("weight_versions")
    if spans:
        runs: list[tuple[str | None, int]] = []
        position = 0
        try:
            for span in spans:
                end = span["end"]
                if span["start"] != position or type(end) is not int or end <= position:
                    break
                runs.append((_name(span["version"]), end - position))
                position = end
        except (TypeError, KeyError):
            position = -1
        if position == count:
            return tuple(runs)
        return ((None, count),)
    return ((_name(meta.get("weight_version")), count),)


def _name(version: Any) -> str | None:
    return sys.intern(str(version)) if version is not None else None
