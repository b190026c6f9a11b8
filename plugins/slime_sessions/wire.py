"""Samples as miles' client reads them: one safetensors file.

Format: miles/rollout/session/samples/codec.py at 31f1ca961. For sample ``i`` there are the tensors ``tokens.i``
(int64, all tokens) and, for the tokens of the response only, ``loss_mask.i`` (uint8) and ``rollout_log_probs.i``
(float64). ``rollout_routed_experts.i`` and ``rollout_indexer_topk.i`` (int32, ``[tokens - 1, layers, top_k]``) are each
there only if their values are known. All else is JSON, the bytes of the uint8 tensor ``_samples_meta``: ``{"samples":
[{field: value, "nulls": [field]}], "session_metadata", "empty_reason"}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from slime_rows.body_pieces import Piece
from slime_rows.members import Member
from slime_rows.safetensors_file import safetensors_file
from slime_sessions.samples import ROWS, Sample

__all__ = ["encode"]

_META = "_samples_meta"
_INT32 = np.dtype("<i4")


def encode(
    samples: Sequence[Sample],
    metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    reward: Any = None,
    agent: Mapping[str, Any] | None = None,
) -> Iterator[Piece]:
    """Yield the reply. Each of ``samples`` gets ``reward``, and its own metadata get the fields of ``agent``.

    ``metadata``: the session's metadata. ``empty_reason``: the reason why there are no samples.
    """
    members = []
    described = []
    for index, sample in enumerate(samples):
        members += [
            Member(f"tokens.{index}", [sample.tokens]),
            Member(f"loss_mask.{index}", [sample.loss_mask]),
            Member(f"rollout_log_probs.{index}", [sample.logprobs]),
        ]
        known = {rows.name: rows for rows in sample.rows if rows.found is not None}
        members += [Member(f"rollout_{name}.{index}", [rows], _INT32) for name, rows in known.items()]
        described.append(
            {
                "response": sample.response,
                "response_length": len(sample.loss_mask),
                "status": sample.status,
                "weight_versions": sample.weight_versions,
                "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
                "metadata": {**(agent or {}), "leaf": sample.leaf, **_about_experts(sample)},
                "reward": reward,
                "nulls": [f"rollout_{name}" for name in ROWS if name not in known],
            }
        )
    meta = {"samples": described, "session_metadata": metadata, "empty_reason": empty_reason}
    text = orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY)
    members.append(Member(_META, [np.frombuffer(text, np.uint8)]))
    members.sort(
        key=lambda member: (member.dtype.kind != "i", member.name)
    )  # safetensors_file then sorts by the size of values; both sorts give the order of the safetensors library
    yield from safetensors_file(members)


def _about_experts(sample: Sample) -> dict[str, Any]:
    """Return what the metadata say about routed experts; nothing if no plugin records them."""
    for rows in sample.rows:
        if rows.name == ROWS[0]:
            return {"experts_exact": rows.found is not None, "routed_experts_reason": rows.reason}
    return {}
