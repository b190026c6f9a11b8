"""The tokens of a context as arrays for a trainer, and the reason if they are not exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slime_radix_cache.index.losses import Count
from slime_radix_cache.index.segments import (
    Context,
    Response,
    Segment,
    Versions,
    doubt_of,
    links,
)
from slime_radix_cache.index.text_search import Match
from slime_radix_cache.retrieval.token_rows import INT32
from slime_rows.rows import Rows

__all__ = [
    "PROMPT",
    "Answer",
    "Lost",
    "Record",
    "about_record",
    "has_logprobs",
    "inexact_reason",
    "reason_of_record",
    "record_of",
]

#: The version of tokens with mask 0. An engine's own versions are strings.
PROMPT = -1


@dataclass(frozen=True, slots=True)
class Record:
    """The tokens of a context, with mask, logprob and version of each.

    ``loss_mask``: 1 for sampled tokens to train on, see :func:`record_of`. ``logprobs``: the engine's, bit for bit; 0.0
    where the mask is 0, NaN where the engine gave none. ``spans``: ``(version, count)`` of runs of tokens. A version is
    the string that the engine sent, None if it sent none, ``PROMPT`` where the mask is 0. ``has_logprobs``: no logprob
    is NaN.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float64]
    spans: tuple[tuple[str | int | None, int], ...]
    has_logprobs: bool

    @property
    def versions(self) -> list[str | int | None]:
        """The version of each token."""
        return [version for version, count in self.spans for _ in range(count)]

    def weight_versions(self) -> list[dict[str, Any]]:
        """Return the runs with mask 1 by weight version, in SGLang's form: ``{version, start, end}``, in tokens."""
        found: list[dict[str, Any]] = []
        position = 0
        for version, count in self.spans:
            end = position + count
            if version != PROMPT and count:
                if found and found[-1]["version"] == version and found[-1]["end"] == position:
                    found[-1]["end"] = end
                else:
                    found.append({"version": version, "start": position, "end": end})
            position = end
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A record, with the other fields of the answer (``about``, ready for JSON).

    ``logprobs``: the answer includes logprobs. ``rows``: values of each token, such as routed experts, that the request
    asks for. ``row_form``: the form of ``rows`` in JSON, see WantedRows.
    """

    record: Record
    about: dict[str, Any]
    logprobs: bool = True
    rows: tuple[Rows, ...] = ()
    row_form: str = INT32


def record_of(context: Context, rest: bytes = b"", session: str | None = None) -> Record:
    """Return the record of ``context`` followed by ``rest``, packed ids that count as a prompt. O(tokens).

    The mask is 1 for the responses up to the last response that ``session`` sampled, also for responses of other
    sessions that ``session`` continued. If ``session`` is None, the mask is 1 for all responses. But in both cases the
    mask is 0 for contradictory responses, and for responses of another LoRA adapter than the last of these responses.
    """
    chain = list(links(context))
    trained = _trained(chain, session)
    wide = any(response.has_wide_logprobs for response in trained)
    kind, size = (np.float64, 8) if wide else (np.float32, 4)
    ids: list[bytes] = []
    mask: list[bytes] = []
    logprobs: list[bytes] = []
    spans: list[tuple[str | int | None, int]] = []
    for segment, length in reversed(chain):
        ids.append(segment.packed[: 4 * length])
        if segment in trained:
            assert isinstance(segment, Response)  # narrowing: prompts are not trained
            mask.append(b"\1" * length)
            logprobs.append(segment.packed_logprobs(length, wide=wide))
            spans += segment.versions if length == len(segment) else _first(segment.versions, length)
        else:
            mask.append(bytes(length))
            logprobs.append(bytes(size * length))
            spans.append((PROMPT, length))
    length = len(rest) // 4
    ids.append(rest)
    mask.append(bytes(length))
    logprobs.append(bytes(size * length))
    spans.append((PROMPT, length))
    values = np.frombuffer(b"".join(logprobs), kind).astype(np.float64, copy=False)
    tokens = np.frombuffer(b"".join(ids), np.int32)
    loss_mask = np.frombuffer(b"".join(mask), np.int8)
    return Record(tokens, loss_mask, values, tuple(spans), not np.isnan(values).any())


def _trained(chain: Sequence[tuple[Segment, int]], session: str | None) -> set[Response]:
    """Return the responses in ``chain`` (last segment first) that have mask 1 for ``session``."""
    trained: set[Response] = set()
    adapter: str | None = None
    is_known = False
    for segment, _ in chain:
        if not isinstance(segment, Response):
            continue
        if not is_known:
            if session is not None and segment.session != session:
                continue  # another session sampled it after the last response of ``session``
            is_known, adapter = True, segment.adapter
        if segment.adapter == adapter and segment.is_fact:
            trained.add(segment)
    return trained


def _first(versions: Versions, length: int) -> Versions:
    """Return the runs of the first ``length`` tokens."""
    runs: list[tuple[str | None, int]] = []
    for version, count in versions:
        runs.append((version, min(count, length)))
        length -= count
        if length <= 0:
            break
    return tuple(runs)


def about_record(record: Record, reason: str | None, matched: int, candidates: Count) -> dict[str, Any]:
    """Return the fields that every answer has besides its tokens. ``reason``: why the tokens are not exact."""
    length = len(record.tokens)
    return {
        "token_length": length,
        "loss_mask_length": length,
        "exact": reason is None,
        "inexact_reason": reason,
        "matched_length": matched,
        "candidates": candidates.number,
        "candidates_relation": "gte" if candidates.at_least else "eq",
    }


def has_logprobs(context: Context, session: str | None) -> bool:
    """Return True if all tokens with mask 1 in the record of ``context`` for ``session`` have logprobs.

    The record is not made. O(sampled tokens).
    """
    chain = list(links(context))
    trained = _trained(chain, session)
    return not any(
        np.isnan(response.logprob_array(length)).any()
        for response, length in chain
        if isinstance(response, Response) and response in trained
    )


def reason_of_record(context: Context, *, has_logprobs: bool) -> str | None:
    """Return the reason why the record of ``context`` is not exact; None if it is.

    - ``engine_contradicts_itself``, ``unknown_field:NAME``: the doubt of the earliest segment that has one.
    - ``no_logprobs``: a token with mask 1 has no logprob.
    """
    return doubt_of(context) or (None if has_logprobs else "no_logprobs")


def inexact_reason(match: Match, text: bytes, record: Record, losses: Callable[[], Lost]) -> str | None:
    """Return the reason why ``record``, made from ``match`` for ``text``, is not exact; None if it is.

    ``losses`` is called only if needed, since it hashes the whole text.

    - ``cut_inside_token``: the text ends within a sampled token, so the end of the text was tokenised again.
    - ``evicted``: no session has all of the text, and a context with this text was lost. Or all of these hold: only
      other sessions have all of the text; this session lost a response; and a context with this text was lost, or a
      context of only prompts has all of the text.
    - ``uncovered_text``: no engine has consumed the end of the text in this context, or the text is empty.
    - ``other_session``: only other sessions have all of the text. They sampled part of it, or this session has only
      its beginning.
    - the reasons of :func:`reason_of_record`.
    """
    if not text:
        return "uncovered_text"
    if match.others is not None:
        lost = losses()
        if lost.session and (lost.text or match.others == "asked"):
            return "evicted"
        if match.others == "sampled" or match.position < len(text):
            return "other_session"
    elif match.position < len(text):
        if match.inside_response:
            return "cut_inside_token"
        return "evicted" if losses().text else "uncovered_text"
    return reason_of_record(match.context, has_logprobs=record.has_logprobs)


class Lost(NamedTuple):
    """Losses for one request. ``session``: its session may have lost a response. ``text``: its text may be lost."""

    session: bool
    text: bool
