"""Parts of the answers and events of a generation: ids, per-token lists, and figures that an abort lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "PER_TOKEN",
    "TOKEN_ARRAYS",
    "News",
    "extended",
    "ids_in",
    "ids_of",
    "is_abort",
    "is_aborted",
    "read_event",
    "sampled_ids",
    "with_missing",
    "without_queued",
]

#: Lists in ``meta_info`` with an entry for each sampled token. In an incremental stream, SGLang sends deltas of them.
PER_TOKEN = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
#: Arrays in ``meta_info`` with a row for each token, see ``slime_sglang.token_arrays``.
TOKEN_ARRAYS = ("routed_experts", "indexer_topk")
#: Figures about all tokens so far. When more tokens have come, such figures of an earlier event are wrong.
_OF_ALL_TOKENS = frozenset(
    (
        *PER_TOKEN,
        *("completion_tokens", "weight_versions"),
        *TOKEN_ARRAYS,
        *("output_token_logprobs_length", "output_token_sampling_mask_length"),
    )
)


def is_abort(meta: Mapping[str, Any]) -> bool:
    """Return True for the ``meta_info`` of a sequence that was aborted, for any reason."""
    reason = meta.get("finish_reason")
    return isinstance(reason, dict) and reason.get("type") == "abort"


def is_aborted(output: Any) -> bool:
    """Return True for an answer or event of an aborted sequence, unless the abort is due to the request (4xx)."""
    meta = output.get("meta_info") if isinstance(output, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return False
    status = reason.get("status_code")
    return not (isinstance(status, int) and 400 <= status < 500)


def read_event(output: Any) -> dict[str, Any]:
    """Return ``output`` if it is an object about one response. Raises ValueError."""
    if not isinstance(output, dict) or not isinstance(output.get("meta_info"), dict):
        raise ValueError("wanted an object with meta_info")
    return output


def sampled_ids(answer: Mapping[str, Any]) -> list[int]:
    """Return a copy of the ids in ``answer``, or of the ids in its logprobs if it has no ``output_ids``."""
    return list(ids_in(answer, answer["meta_info"]) or ())


def ids_in(event: Mapping[str, Any], meta: Mapping[str, Any]) -> list[int] | None:
    ids = event.get("output_ids")
    if ids is None:
        logprobs = meta.get("output_token_logprobs")
        return ids_of(logprobs) if logprobs else None
    if not isinstance(ids, list):
        raise ValueError(f"wanted a list of output_ids, got {type(ids).__name__}")
    return ids


def ids_of(logprobs: Any) -> list[int]:
    try:
        return [entry[1] for entry in logprobs]
    except (LookupError, TypeError):
        raise ValueError("wanted logprobs as [logprob, id, text]") from None


def with_missing(before: dict[str, Any], event: dict[str, Any], *, grown: bool) -> dict[str, Any]:
    """Return the abort ``event``, completed by fields of ``before``. ``grown``: ``event`` has new tokens."""
    known, told = before["meta_info"], event["meta_info"]
    kept = {name: value for name, value in known.items() if not (grown and name in _OF_ALL_TOKENS)}
    meta = {**kept, **told}
    if not grown and not told.get("weight_versions") and known.get("weight_version") is not None:
        # The abort names the present version, but the tokens so far are older.
        meta["weight_version"] = known["weight_version"]
    return {**before, **event, "meta_info": meta}


def without_queued(before: str, text: str) -> str:
    """Return the whole text of an aborted sequence. ``before``: the text of the events before the abort.

    ``text``: the text of the abort, either the whole text, or the new text followed by the whole text.
    """
    queued = text[: (len(text) - len(before)) // 2] if len(text) >= len(before) else ""
    whole = before + queued
    if text == queued + whole:
        return whole
    return text if text.startswith(before) else before


class News(NamedTuple):
    """New content of an event. ``ids``: all ids so far if ``has_all``, else the new ids.

    ``is_full``: the event has all text so far. ``again``: the number of repeated ids at the event's end, which are not
    in ``ids``.
    """

    ids: list[int]
    has_all: bool
    is_full: bool
    again: int = 0


def extended(known: Any, told: Any, total: int, news: News) -> Any:
    """Return ``known`` plus the entries of ``told`` for new tokens. ``told`` may cover all ``total`` tokens.

    The caller may change the result. ``told`` is never changed, since it is part of an event that others may have.
    """
    new = len(news.ids)
    if not isinstance(told, list):
        return told
    if not isinstance(known, list) or (len(told) == total and told[: len(known)] == known):
        return list(told)  # some servers send cumulative lists with delta ids
    if news.again and len(told) == new + total:
        return told[new:]
    known += told[:new] if len(told) == new + news.again else told
    return known
