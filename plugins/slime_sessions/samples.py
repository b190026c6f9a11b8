"""Training samples of a session: one for each leaf of its tree, as miles' session server makes them.

The rules are those of miles at 31f1ca961: miles/rollout/session/samples/merge.py (truncation), generate_utils/
sample_utils.py (the end of a sample), session/v2/picker_hub/drop_retries.py and v2/postprocessor_hub (the choice of
leaves, and of the leaf that trains on shared tokens).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from router_core.errors import HTTPError
from slime_rows.rows import Rows
from slime_sessions.tree import COMPLETED, leaves, statuses_of

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionTurns, Turn, TurnContext, TurnRecord

__all__ = ["ROWS", "InexactSession", "Sample", "samples_of"]

_PROMPT = -1
#: Fields of ``meta_info`` with a row for each token.
ROWS = ("routed_experts", "indexer_topk")


class InexactSession(HTTPError):
    """A session with a sample that would not be exact, or would be missing."""

    status, type, code = 422, "invalid_request_error", "INEXACT_SESSION"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. ``loss_mask`` and ``logprobs`` belong to the response: the last ``len(loss_mask)`` tokens.

    ``status``: completed, truncated or aborted. ``weight_versions``: the version of each run of sampled tokens, in
    order. ``rows``: those of ``ROWS`` that a plugin records, ``[len(tokens) - 1, layers, top_k]`` if they are known.
    """

    tokens: npt.NDArray[np.int64]
    response: str
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float64]
    status: str
    weight_versions: list[str]
    leaf: dict[str, Any]
    rows: Sequence[Rows]


@dataclass(frozen=True, slots=True)
class _Path:
    """A leaf and its context (all tokens up to the leaf's end). The sample has the first ``end`` of these tokens."""

    leaf: Turn
    context: TurnContext
    end: int
    status: str


def samples_of(
    source: SessionTurns, session: str, turns: Sequence[Turn], max_seq_len: int | None, *, retries: bool
) -> list[Sample]:
    """Return the samples of ``session``, made from its ``turns``. Samples with the most turns come first.

    A sample without tokens to train on is left out. O(tokens of all samples). Raises InexactSession.
    """
    statuses = statuses_of(turns)
    paths = []
    for leaf in leaves(turns, statuses, retries=retries):
        context = source.context(leaf, turns)
        if context.inexact_reason is not None:
            raise InexactSession(
                f"the tokens of turn {leaf.number} are not exact: {context.inexact_reason}"
                f" (GET /trajectories/{quote(session)} has what is known)"
            )
        end, status = _kept(context, statuses, max_seq_len)
        if end:
            paths.append(_Path(leaf, context, end, status))
    trained: dict[Hashable, int] = {}
    # Oldest leaf first: it trains on the tokens that leaves share.
    samples = [_sample(source, path, trained) for path in paths]
    samples.sort(key=lambda sample: (len(sample.leaf["path_node_ids"]), sample.leaf["node_id"]), reverse=True)
    return [sample for sample in samples if sample.loss_mask.any()]


def _kept(context: TurnContext, statuses: Mapping[int, str], max_seq_len: int | None) -> tuple[int, str]:
    """Return the number of tokens of ``context`` in the sample, and the sample's status.

    The sample ends with the first turn that was not completed. A turn of which the client kept only a part counts as
    completed. If a turn goes beyond ``max_seq_len``, the sample is cut at that length, and is "truncated". But if the
    turn's response begins at that length or later, the sample ends with the turn before, and has the status of that
    turn. If there is no turn before, the sample is empty.
    """
    end, status = 0, COMPLETED
    for number, start, stop, is_whole in context.spans:
        if max_seq_len is not None and stop > max_seq_len:
            return (max_seq_len, "truncated") if start < max_seq_len else (end, status)
        end, status = stop, statuses[number] if is_whole else COMPLETED
        if status != COMPLETED:
            break
    return end, status


def _sample(source: SessionTurns, path: _Path, trained: dict[Hashable, int]) -> Sample:
    """Make the sample of ``path``. ``trained``: by response, the position up to which earlier samples train on it."""
    record, end = path.context.record, path.end
    mask = record.loss_mask[:end].astype(np.uint8)
    sampled = np.flatnonzero(mask)
    start = int(sampled[0]) if len(sampled) else end
    for key, begin, stop in path.context.sampled:
        if not mask[begin:stop].any():
            continue  # the response is of another LoRA adapter than the leaf, or begins after the sample's end
        shared = trained.get(key, begin)
        mask[begin : min(stop, shared)] = 0
        trained[key] = max(shared, min(stop, end))
    numbers = [number for number, begin, *_ in path.context.spans if begin < end]
    return Sample(
        record.tokens[:end].astype(np.int64),
        source.spell(record.tokens[start:end].tolist()),
        mask[start:],
        record.logprobs[start:end],
        path.status,
        list(_versions(record, end)),
        {"node_id": path.leaf.number, "parent": path.leaf.before, "path_node_ids": numbers},
        list(_rows(source, path)),
    )


def _rows(source: SessionTurns, path: _Path) -> Iterator[Rows]:
    for name in ROWS:
        found = source.rows(name, path.leaf, path.end)
        if found is not None:
            is_flat = not isinstance(found, str) and len(found.shape) != 3
            yield Rows.of(name, "shape_unknown" if is_flat else found)


def _versions(record: TurnRecord, end: int) -> Iterator[str]:
    position = 0
    for version, count in record.spans:
        if position >= end:
            return
        if count and version is not None and version != _PROMPT:
            yield str(version)
        position += count
