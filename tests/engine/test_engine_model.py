"""The model's distribution is a real one, fixed by context and version."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from slime_engine.model import NgramModel, load_model, log_softmax


def test_each_context_has_a_full_distribution(model: NgramModel) -> None:
    dice = random.Random(0)
    contexts: list[list[int]] = [[], [5]]
    contexts += [[dice.randrange(model.vocab_size) for _ in range(2)] for _ in range(200)]
    contexts += [model.tokenizer.encode("The capital of")[-2:]]
    for context in contexts:
        logits = model.next_logits(context, "default")
        assert logits.shape == (model.vocab_size,)
        assert np.isfinite(logits).all()
        assert np.exp(log_softmax(logits)).sum() == pytest.approx(1.0, abs=1e-12)


def test_the_model_has_learnt_its_text(model: NgramModel) -> None:
    ids = model.tokenizer.encode("The capital of France is Paris.")
    shuffled = random.Random(1).sample(ids, len(ids))
    assert sum(model.logprobs(ids, "default")) > sum(model.logprobs(shuffled, "default")) + 20


def test_two_loads_give_the_same_model(model: NgramModel) -> None:
    ids = list(range(0, model.vocab_size, 7))
    assert load_model.__wrapped__().logprobs(ids, "3") == model.logprobs(ids, "3")


def test_a_version_is_other_weights(model: NgramModel) -> None:
    ids = model.tokenizer.encode("The harbour wakes before the town does.")
    values = [model.logprobs(ids, version) for version in ("default", "1", "2")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        differences = [abs(a - b) for a, b in zip(values[one], values[other], strict=True)]
        assert all(differences)
        assert sum(differences) / len(ids) < 1, "still much the same model"


def test_many_versions_do_not_change_an_old_one(model: NgramModel) -> None:
    before = model.logprobs([1, 2, 3], "old")
    for version in range(200):
        model.logprobs([1], str(version))
    assert model.logprobs([1, 2, 3], "old") == before


def test_logprobs_take_a_version_for_each_token_and_a_start(model: NgramModel) -> None:
    ids = model.tokenizer.encode("think before you measure")
    first, second = model.logprobs(ids, "a"), model.logprobs(ids, "b")
    versions = ["a"] * 2 + ["b"] * (len(ids) - 2)
    assert model.logprobs(ids, versions) == first[:2] + second[2:]
    assert model.logprobs(ids, "a", start=2) == first[2:]
    with pytest.raises(ValueError, match="zip"):
        model.logprobs(ids, ["a"])


def test_temperature_sharpens_and_flattens(model: NgramModel) -> None:
    ids = model.tokenizer.encode("The capital of France is")
    likely = int(np.argmax(model.next_logits(ids, "default")))
    cold, warm, hot = (
        model.logprobs([*ids, likely], "default", start=len(ids), temperature=temperature)[0]
        for temperature in (0.5, 1.0, 2.0)
    )
    assert cold > warm > hot
    assert model.logprobs([*ids, likely], "default", start=len(ids), temperature=0) == [warm]
    assert hot > math.log(1 / model.vocab_size)
