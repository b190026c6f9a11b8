"""Training samples of rollouts: with the tokens that the router recorded, or with those of the text tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from examples.grpo_tiny.rollouts import Rollout

__all__ = ["Sample", "advantages", "recorded", "tokenised_again"]

_START_OF_ANSWER, _END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens with their loss mask and their log-probabilities in the rollout.

    ``logprobs`` is None if they are not known. ``experts``, ``[tokens - 1, layers, top_k]``: see SGLang's
    ``routed_experts``.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float64] | None
    experts: npt.NDArray[np.int64] | None = None


def recorded(record: Mapping[str, Any]) -> Sample:
    """Return the sample in ``record``, a result of ``AsyncClient.retrieve``. Raises ValueError if it is not exact."""
    if not record["exact"] or not record.get("experts_exact", True):
        reason = record["inexact_reason"] or record.get("routed_experts_reason")
        raise ValueError(f"the tokens or their experts are not exact: {reason}")
    experts = record.get("routed_experts")
    return Sample(
        np.asarray(record["tokens"], np.int64),
        np.asarray(record["loss_mask"], np.bool_),
        np.asarray(record["rollout_logp"], np.float64),
        None if experts is None else np.asarray(experts, np.int64),
    )


def tokenised_again(rollout: Rollout, tokenizer: Tokenizer) -> Sample:
    """Return the sample that a trainer makes if it gets only the text. This sample has no log-probabilities.

    The mask covers each answer, and the end-of-turn token that the chat template writes after the answer.
    """
    encoding = tokenizer.encode(rollout.text + _END_OF_TURN, add_special_tokens=False)
    mask = np.zeros(len(encoding.ids), np.bool_)
    place = 0
    for answer in rollout.answers:
        place = rollout.text.index(_START_OF_ANSWER, place) + len(_START_OF_ANSWER)
        end = place + len(answer) + len(_END_OF_TURN)
        mask |= [place <= start < end for start, _ in encoding.offsets]
        place += len(answer)
    return Sample(np.asarray(encoding.ids, np.int64), mask, None)


def advantages(rollouts: Sequence[Rollout]) -> list[float]:
    """Return each rollout's reward, relative to the mean and the spread of its group."""
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    return [
        float((rollout.reward - np.mean(groups[rollout.group])) / (np.std(groups[rollout.group]) + 1e-4))
        for rollout in rollouts
    ]
