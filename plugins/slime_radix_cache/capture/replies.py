"""An engine's answer, read from SGLang's JSON and checked.

Every key may be missing: an aborted generation has few of them.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, NamedTuple

import orjson

from slime_radix_cache.index.segments import Versions, pack_logprobs
from slime_sglang.evidence import Columns, columns_of

__all__ = ["NOTHING_SAMPLED", "Output", "Unusable", "read_output"]

#: The kind of an answer that has no tokens and claims none.
NOTHING_SAMPLED = "nothing_sampled"


class Unusable(Exception):
    """An answer that cannot be recorded. ``kind``: the reason, for counting."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Output(NamedTuple):
    """One sampled sequence. ``ids`` and ``logprobs`` are packed (see segments); ``ids`` is not empty.

    Left out: logprobs of other ids, and versions that do not fit; :func:`slime_sglang.contradiction` names them.
    ``columns``: those of ``output_token_logprobs``.
    """

    text: str
    ids: bytes
    logprobs: bytes | None
    versions: Versions
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
    return Output(
        text,
        ids,
        logprobs,
        _versions(meta, len(ids) // 4),
        sys.intern(orjson.dumps(meta.get("finish_reason")).decode()),
        columns,
    )


def _tokens(ids: Any, triples: Any, columns: Columns | None) -> tuple[bytes, bytes | None]:
    """Pack the ids and logprobs in ``output_ids`` and ``[logprob, id, text]``; each may be missing."""
    if ids is None:
        ids = columns.ids if columns is not None else [triple[1] for triple in triples or ()]
    packed = array("i", ids).tobytes()
    if columns is None or columns.ids != ids:
        return packed, None  # none, or they are of other tokens
    try:
        return packed, pack_logprobs(columns.logprobs)
    except TypeError:
        return packed, None  # they are no logprobs


def _versions(meta: dict[str, Any], count: int) -> Versions:
    """Return the versions of ``count`` tokens, from spans or one for all; the version None if the spans do not fit."""
    spans = meta.get("weight_versions")
    if spans:
        runs: list[tuple[str | None, int]] = []
        position = 0
        try:
            for span in spans:
                if span["start"] != position or span["end"] <= position:
                    break
                runs.append((_name(span["version"]), span["end"] - position))
                position = span["end"]
        except (TypeError, KeyError):
            position = -1
        if position == count:
            return tuple(runs)
        return ((None, count),)
    return ((_name(meta.get("weight_version")), count),)


def _name(version: Any) -> str | None:
    return sys.intern(str(version)) if version is not None else None
