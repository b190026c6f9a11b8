"""Differences between an answer's log-probabilities in the trainer and in the rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from examples.grpo_tiny.samples import Sample

__all__ = ["differences"]


def differences(
    rollout: Sample, trained: Sample, logprobs: npt.NDArray[np.float64], tokenizer: Tokenizer
) -> list[float]:
    """Return ``|trainer logprob - rollout logprob|`` of each sampled token.

    ``logprobs``: the trainer's log-probabilities of the tokens of ``trained``, except the first. If ``trained`` has
    other tokens than were sampled, the text is cut into pieces at each place where both samples have the end of a
    token, and the pieces are compared. Each sampled token of a piece then gets an equal share of its difference.
    """
    assert rollout.logprobs is not None
    if np.array_equal(rollout.tokens, trained.tokens):
        return [float(each) for each in np.abs(rollout.logprobs[1:] - logprobs)[rollout.mask[1:]]]
    text = tokenizer.decode(rollout.tokens.tolist(), skip_special_tokens=False)
    sampled = _sums(rollout, rollout.logprobs, text, tokenizer)
    computed = _sums(trained, np.concatenate([[0.0], logprobs]), text, tokenizer)
    found: list[float] = []
    before = (0.0, 0)
    other = 0.0
    for end in sorted(sampled.keys() & computed.keys()):
        total, count = sampled[end]
        size = count - before[1]
        if size:
            wanted, got = total - before[0], computed[end][0] - other
            found += [abs(got - wanted) / size] * size
        before, other = (total, count), computed[end][0]
    return found


def _sums(
    sample: Sample, logprobs: Sequence[float] | npt.NDArray[np.float64], text: str, tokenizer: Tokenizer
) -> dict[int, tuple[float, int]]:
    """Return, by the place in ``text`` where a token ends, two values for the trained tokens up to that place.

    The values are the sum of the log-probabilities of these tokens, and the number of these tokens.
    """
    ids = sample.tokens.tolist()
    found: dict[int, tuple[float, int]] = {}
    total, count = 0.0, 0
    for place, trained in enumerate(sample.mask):
        if trained:
            total, count = total + float(logprobs[place]), count + 1
        prefix = tokenizer.decode(ids[: place + 1], skip_special_tokens=False)
        if text.startswith(prefix):
            found[len(prefix)] = (total, count)
    return found
