"""A context as the arrays that a trainer wants, and whether they are exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_radix_cache.matching import Match
from slime_radix_cache.segments import Context, Response, last_response, links

__all__ = ["Record", "inexact_reason", "record_of"]


@dataclass(frozen=True, slots=True)
class Record:
    """The tokens of a context and what is known of each; all of one length.

    ``loss_mask``: 1 where the policy sampled. ``logprobs``: the engine's, bit for bit; 0.0 where the mask is 0, NaN
    where the engine gave none. ``versions``: as the engine named them, None where it did not, -1 where the
    mask is 0. ``has_logprobs`` is false when a NaN is among the logprobs.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float64]
    versions: list[str | int | None]
    has_logprobs: bool


def record_of(context: Context, rest: bytes = b"") -> Record:
    """``context``, and the packed ids ``rest`` behind it as a prompt. O(tokens), a few array operations a segment."""
    ids: list[bytes] = []
    mask: list[bytes] = []
    logprobs: list[npt.NDArray[np.float64]] = []
    versions: list[str | int | None] = []
    for segment, length in reversed(list(links(context))):
        ids.append(segment.ids[: 4 * length])
        if isinstance(segment, Response):
            mask.append(b"\x01" * length)
            logprobs.append(segment.logprob_array(length))
            before = len(versions)
            for version, count in segment.versions:
                versions += [version] * count
            del versions[before + length :]
        else:
            mask.append(bytes(length))
            logprobs.append(np.zeros(length))
            versions += [-1] * length
    behind = len(rest) // 4
    ids.append(rest)
    mask.append(bytes(behind))
    logprobs.append(np.zeros(behind))
    versions += [-1] * behind
    values = np.concatenate(logprobs)
    return Record(
        np.frombuffer(b"".join(ids), np.int32),
        np.frombuffer(b"".join(mask), np.int8),
        values,
        versions,
        not np.isnan(values).any(),
    )


def inexact_reason(
    match: Match, text: bytes, record: Record, session: str | None, *, evicted: bool
) -> str | None:
    """Why ``record``, made from ``match`` for ``text``, is not exact; None when it is.

    - ``cut_inside_token``: the text ends within a sampled token; what is left of it was tokenised again.
    - ``evicted``: the text was recorded, and had to go.
    - ``uncovered_text``: no engine has consumed the end of the text behind its beginning.
    - ``other_session``: only another session has said this.
    - ``no_logprobs``: a sampled token has none.
    """
    if match.position < len(text):
        if match.inside_response:
            return "cut_inside_token"
        return "evicted" if evicted else "uncovered_text"
    if session is not None and match.context is not None:
        sampled = last_response(match.context[0])
        if sampled is not None and sampled.session not in (session, None):
            return "other_session"
    return None if record.has_logprobs else "no_logprobs"
