"""Samples as miles' client reads them: one safetensors file.

Format: miles/rollout/session/samples/codec.py at 31f1ca961. For sample ``i`` there are the tensors ``tokens.i``
(int64), ``loss_mask.i`` (uint8) and ``rollout_log_probs.i`` (float64, of the response). Where the rows are known, there
are also ``rollout_routed_experts.i`` and ``rollout_indexer_topk.i`` (int32, ``[tokens - 1, layers, top_k]``). All
else is JSON, the bytes of the uint8 tensor ``_samples_meta``: ``{"samples": [{field: value, "nulls": [field]}],
"session_metadata", "empty_reason"}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from slime_sessions.samples import ROWS, Rows, Sample

__all__ = ["encode"]

_META = "_samples_meta"


def encode(
    samples: Sequence[Sample],
    rows: Sequence[Rows],
    metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    reward: Any = None,
    agent: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the reply: ``samples`` with their ``rows``, each with ``reward``, and with ``agent`` in its metadata."""
    tensors: dict[str, Any] = {}
    described = []
    for index, (sample, known) in enumerate(zip(samples, rows, strict=True)):
        tensors[f"tokens.{index}"] = np.ascontiguousarray(sample.tokens)
        tensors[f"loss_mask.{index}"] = np.ascontiguousarray(sample.loss_mask)
        tensors[f"rollout_log_probs.{index}"] = np.ascontiguousarray(sample.logprobs)
        nulls = []
        for name in ROWS:
            values = known.get(name)
            if values is None or isinstance(values, str):
                nulls.append(f"rollout_{name}")
            else:
                tensors[f"rollout_{name}.{index}"] = np.ascontiguousarray(values, np.int32)
        described.append(
            {
                "response": sample.response,
                "response_length": len(sample.loss_mask),
                "status": sample.status,
                "weight_versions": sample.weight_versions,
                "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
                "metadata": {**(agent or {}), "leaf": sample.leaf, **_about_experts(known)},
                "reward": reward,
                "nulls": nulls,
            }
        )
    meta = {"samples": described, "session_metadata": metadata, "empty_reason": empty_reason}
    tensors[_META] = np.frombuffer(orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY), np.uint8)
    return safetensors.numpy.save(tensors)


def _about_experts(known: Rows) -> dict[str, Any]:
    """Return what the metadata say about routed experts; nothing if no plugin records them."""
    rows = known.get(ROWS[0])
    if rows is None:
        return {}
    reason = rows if isinstance(rows, str) else None
    return {"experts_exact": reason is None, "routed_experts_reason": reason}
