"""Samples as miles' client reads them: one safetensors file.

Format: miles/rollout/session/samples/codec.py at 31f1ca961. For sample ``i`` there are the tensors ``tokens.i``
(int64), ``loss_mask.i`` (uint8) and ``rollout_log_probs.i`` (float64, of the response). All else is JSON, the bytes of
the uint8 tensor ``_samples_meta``: ``{"samples": [{field: value, "nulls": [field]}], "session_metadata",
"empty_reason"}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from slime_sessions.samples import Sample

__all__ = ["encode"]

_META = "_samples_meta"
#: Fields that are not recorded.
_NULLS = ["rollout_routed_experts", "rollout_indexer_topk"]


def encode(
    samples: Sequence[Sample],
    metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    reward: Any = None,
    agent: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the reply with ``samples``, each with ``reward``, and with ``agent`` in its metadata."""
    tensors: dict[str, Any] = {}
    described = []
    for index, sample in enumerate(samples):
        tensors[f"tokens.{index}"] = np.ascontiguousarray(sample.tokens)
        tensors[f"loss_mask.{index}"] = np.ascontiguousarray(sample.loss_mask)
        tensors[f"rollout_log_probs.{index}"] = np.ascontiguousarray(sample.logprobs)
        described.append(
            {
                "response": sample.response,
                "response_length": len(sample.loss_mask),
                "status": sample.status,
                "weight_versions": sample.weight_versions,
                "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
                "metadata": {**(agent or {}), "leaf": sample.leaf},
                "reward": reward,
                "nulls": _NULLS,
            }
        )
    meta = {"samples": described, "session_metadata": metadata, "empty_reason": empty_reason}
    tensors[_META] = np.frombuffer(orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY), np.uint8)
    return safetensors.numpy.save(tensors)
