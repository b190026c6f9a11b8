"""Retrieved tokens as fields of slime's ``Sample``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

__all__ = ["NotExact", "fill_sample"]

_SampleT = TypeVar("_SampleT")
#: slime's ``Status`` for each finish reason of the engine.
_STATUS = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}


class NotExact(Exception):
    """The retrieved tokens, or their routed experts, are not exact. ``reason``: the reason; ``answer``: the answer."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        experts = answer.get("routed_experts_reason")
        self.reason: str = answer["inexact_reason"] or f"routed_experts: {experts}"
        self.answer = answer
        matched, size = answer["matched_length"], len(answer.get("text", answer["response"]))
        super().__init__(
            f"the answer is not exact: {self.reason} ({matched} of {size} characters were recorded); "
            "docs/plugins/radix_cache.md and docs/plugins/r3.md explain each reason"
        )


def fill_sample(sample: _SampleT, answer: Mapping[str, Any], *, allow_inexact: bool = False) -> _SampleT:
    """Fill ``sample`` from ``answer``, a retrieved answer or a record of a session; return ``sample``.

    ``sample`` is any object with slime's attributes. ``tokens`` gets the ids of the whole text. ``response_length`` is
    the number of tokens from the first one whose loss mask is 1 to the end, and 0 if there is no such token;
    ``loss_mask`` and ``rollout_log_probs`` have one value for each of these tokens. ``weight_versions`` has each
    version once, in order. ``status`` is set if the finish reason is stop, length or abort, and the sample's class has
    a ``Status``. ``prompt`` and ``response`` are set only if ``answer`` is a record of a session. A record without a
    finish reason gets the status ABORTED, whether its stream broke off or still runs. ``rollout_routed_experts``
    (int32, ``[tokens - 1, layers, top_k]``) is set if routed experts were asked for; it is None if they are not exact.

    Raises NotExact for an answer that is not exact. If ``allow_inexact`` is True, such an answer is used, and missing
    logprobs are NaN.
    """
    is_exact = answer["exact"] and answer.get("experts_exact", True)
    if not is_exact and not allow_inexact:
        raise NotExact(answer)
    target: Any = sample
    mask = np.asarray(answer["loss_mask"])
    start = int(mask.argmax()) if mask.any() else len(mask)
    target.tokens = np.asarray(answer["tokens"]).tolist()
    target.response_length = len(mask) - start
    target.loss_mask = mask[start:].tolist()
    target.rollout_log_probs = np.asarray(answer["rollout_logp"], np.float64)[start:].tolist()
    versions = dict.fromkeys(answer["generation_versions"])
    target.weight_versions = [version for version in versions if isinstance(version, str)]
    if "experts_exact" in answer:
        rows = answer.get("routed_experts")
        target.rollout_routed_experts = rows.astype(np.int32) if rows is not None else None
    ended = answer.get("finish_reason")
    if "prompt" in answer:
        target.prompt, target.response = answer["prompt"], answer["response"]
        ended = ended or {"type": "abort"}
    statuses = getattr(target, "Status", None)
    if ended is not None and statuses is not None and ended.get("type") in _STATUS:
        target.status = statuses[_STATUS[ended["type"]]]
    return sample
