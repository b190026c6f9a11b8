"""Search of an engine's answer for a figure that is malformed, or contradicts another figure or the request.

A missing figure contradicts nothing, since SGLang's aborts lack most figures (``TokenizerManager._handle_abort_req``).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slime_sglang.event_facts import names_last_version

__all__ = ["CONTRADICTION", "Columns", "columns_of", "contradiction"]

#: The ``inexact_reason`` in records of answers with a contradiction.
CONTRADICTION = "engine_contradicts_itself"

#: A logprob may be this much above 0: engines add up probabilities in float32, and the sum may be a little above 1.
_ROUNDING = 1e-3
_ZERO, _ONE = array("I", (0,)).tobytes(), array("I", (1,)).tobytes()


class Columns(NamedTuple):
    """The logprobs and the ids of ``output_token_logprobs``, as the engine's JSON has them."""

    logprobs: list[Any]
    ids: list[Any]


def contradiction(
    answer: Mapping[str, Any],
    *,
    prompt_tokens: int | None,
    rid: str | None,
    columns: Columns | None = None,
) -> str | None:
    """Return the name of the first figure of ``answer`` that is malformed or contradicts another or the request.

    Returns None if there is no such figure.

    ``answer`` is one object of an unstreamed ``/generate`` answer, or is assembled from a stream. ``prompt_tokens``:
    the number of tokens sent, None if unknown. ``rid``: the request's name, None if unknown. ``columns``: the columns
    of the logprobs, if they were read before. O(tokens): 16 µs for 258 tokens with logprobs.
    """
    meta = answer.get("meta_info")
    if meta is None:
        meta = {}
    elif not isinstance(meta, dict):
        return "meta_info"
    if not _is_text(answer.get("text")):
        return "text"
    if not _agrees(meta.get("prompt_tokens"), prompt_tokens):
        return "prompt_tokens"
    told_rid = meta.get("id")
    if not _is_text(told_rid) or (rid is not None and told_rid is not None and told_rid != rid):
        return "id"
    reason = meta.get("finish_reason")
    if reason is not None and not isinstance(reason, dict):
        return "finish_reason"
    return _of_tokens(answer.get("output_ids"), meta, columns)


def _of_tokens(ids: Any, meta: Mapping[str, Any], columns: Columns | None) -> str | None:
    """Return the name of the first figure about sampled tokens that is malformed or contradicts another, or None."""
    if ids is not None and not _are_ids(ids):
        return "output_ids"
    logprobs = meta.get("output_token_logprobs")
    sampled: Sequence[Any] | None = ids
    if logprobs is not None and logprobs != []:
        columns = columns or columns_of(logprobs)
        if columns is None:
            return "output_token_logprobs"
        sampled = columns.ids
        if (ids is not None and sampled != ids) or not _are_logprobs(columns.logprobs):
            return "output_token_logprobs"
        if ids is None and not _are_ids(sampled):
            return "output_token_logprobs"
    count = len(sampled) if sampled is not None else None
    told = meta.get("completion_tokens")
    if not _agrees(told, count):
        return "completion_tokens"
    if not _agrees(meta.get("output_token_logprobs_length"), count if logprobs else None):
        return "output_token_logprobs_length"
    return _of_versions(meta, count if count is not None else told)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # a bool is an int to isinstance


def _agrees(told: Any, known: int | None) -> bool:
    """Return True when ``told`` is missing, or is a count that equals ``known``; any count if ``known`` is None."""
    return told is None or (_is_count(told) and known in (None, told))


def _are_ids(ids: Any) -> bool:
    """Return True for a list of token ids: integers from 0 on, no bool among them."""
    if not isinstance(ids, list):
        return False
    try:
        packed = array("I", ids).tobytes()
    except (TypeError, OverflowError):
        return False
    # An array takes a bool as 0 or 1, so ids without 0 and 1 have no bool. This search is faster than a look at types.
    return not (_ZERO in packed or _ONE in packed) or set(map(type, ids)) == {int}


def columns_of(logprobs: Any) -> Columns | None:
    """Return entries ``[logprob, id, text]`` as columns; None for other entries."""
    try:
        return Columns([entry[0] for entry in logprobs], [entry[1] for entry in logprobs])
    except (LookupError, TypeError):
        return None


def _are_logprobs(values: Sequence[Any]) -> bool:
    """Return True when each of ``values`` is the logarithm of a probability, or null (JSON has no NaN)."""
    try:
        highest = max(values)  # at the speed of C
    except TypeError:
        if not all(value is None or type(value) in (int, float) for value in values):
            return False
        highest = max((value for value in values if value is not None), default=-1)
    if not isinstance(highest, int | float) or highest > _ROUNDING:
        return False
    return highest < 0 or bool not in set(map(type, values))  # a comparison takes false for 0


def _of_versions(meta: Mapping[str, Any], count: int | None) -> str | None:
    version, spans = meta.get("weight_version"), meta.get("weight_versions")
    if not (version is None or type(version) in (str, int)):
        return "weight_version"
    if spans is None or spans == []:
        return None
    if not isinstance(spans, list) or (count is not None and not _covers(spans, count)):
        return "weight_versions"
    return None if names_last_version(version, spans) else "weight_version"


def _covers(spans: list[Any], count: int | None) -> bool:
    """Return True when ``spans`` follow one another from token 0 to token ``count``.

    For no tokens SGLang writes one span, from 0 to 0 (``add_weight_versions_to_meta_info``).
    """
    position: Any = 0
    for span in spans:
        if not isinstance(span, dict) or type(span.get("version")) not in (str, int, type(None)):
            return False
        start, end = span.get("start"), span.get("end")
        if start != position or not _is_count(start) or not _is_count(end) or (end <= start and count):
            return False
        position = end
    return bool(position == count)
