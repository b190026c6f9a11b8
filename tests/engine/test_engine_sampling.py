"""Sampling parameters do what they say, and what cannot be honoured is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from slime_engine.errors import BadRequest
from slime_engine.model import FloatArray, log_softmax
from slime_engine.sampling import SamplingParams, choose, parse_sampling_params, uniform

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))


def drawn(params: SamplingParams, *, forbidden: frozenset[int] = frozenset(), n: int = 4000) -> FloatArray:
    """Return the frequency of each token in ``n`` draws."""
    counts = Counter(
        choose(LOGITS.copy(), params, {}, forbidden, uniform(1, position))[0] for position in range(n)
    )
    return np.array([counts[token] for token in range(len(LOGITS))]) / n


def test_tokens_come_as_often_as_their_probability_says() -> None:
    assert drawn(SamplingParams()) == pytest.approx([0.4, 0.3, 0.15, 0.1, 0.05], abs=0.03)


def test_temperature_changes_the_frequencies_and_the_logprobs() -> None:
    params = SamplingParams(temperature=0.5)
    wanted = np.exp(log_softmax(LOGITS / 0.5))
    assert drawn(params) == pytest.approx(wanted, abs=0.03)
    token, logprobs = choose(LOGITS.copy(), params, {}, frozenset(), 0.5)
    assert logprobs[token] == pytest.approx(math.log(wanted[token]))


def test_temperature_zero_is_greedy_and_reports_plain_logprobs() -> None:
    token, logprobs = choose(LOGITS.copy(), SamplingParams(temperature=0.0), {}, frozenset(), 0.99)
    assert token == 0
    assert logprobs == pytest.approx(LOGITS)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.41), {0, 1}),
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(min_p=0.3), {0, 1, 2}),
        (SamplingParams(top_k=3, min_p=0.5), {0, 1}),
    ],
)
def test_truncation_limits_what_is_drawn_but_not_what_is_reported(
    params: SamplingParams, allowed: set[int]
) -> None:
    frequencies = drawn(params)
    assert {token for token, share in enumerate(frequencies) if share} == allowed
    _, logprobs = choose(LOGITS.copy(), params, {}, frozenset(), 0.5)
    assert logprobs == pytest.approx(LOGITS)


def test_forbidden_tokens_lose_their_probability_to_the_others() -> None:
    frequencies = drawn(SamplingParams(), forbidden=frozenset({0}))
    assert frequencies[0] == 0
    assert frequencies[1] == pytest.approx(0.5, abs=0.03)


def test_penalties_and_bias_change_the_logits() -> None:
    produced = {0: 3, 1: 1}

    def logprobs(**values: Any) -> FloatArray:
        return choose(LOGITS.copy(), SamplingParams(**values), produced, frozenset(), 0.5)[1]

    changed = LOGITS - 0.5 * np.array([3, 1, 0, 0, 0])
    assert logprobs(frequency_penalty=0.5) == pytest.approx(log_softmax(changed))
    changed = LOGITS - 0.5 * np.array([1, 1, 0, 0, 0])
    assert logprobs(presence_penalty=0.5) == pytest.approx(log_softmax(changed))
    changed = LOGITS * np.array([1.5, 1.5, 1, 1, 1])
    assert logprobs(repetition_penalty=1.5) == pytest.approx(log_softmax(changed))
    changed = LOGITS + np.array([0, 0, 0, 0, 9])
    assert logprobs(logit_bias={4: 9.0}) == pytest.approx(log_softmax(changed))


def test_the_last_bit_of_luck_still_hits_a_token() -> None:
    for luck in (0.0, math.nextafter(1.0, 0.0)):
        token, _ = choose(LOGITS.copy(), SamplingParams(top_k=2), {}, frozenset(), luck)
        assert token in (0, 1)


def test_luck_depends_on_seed_and_position_alone() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    values = [uniform(seed, position) for seed in (-1, 0, 1 << 40) for position in range(500)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)


def test_null_means_the_default_except_for_an_open_end() -> None:
    assert parse_sampling_params(dict.fromkeys(["temperature", "stop", "regex", "n"]), 10) == SamplingParams()
    assert parse_sampling_params({"logit_bias": {"3": -1}}, 10).logit_bias == {3: -1.0}
    assert parse_sampling_params({"max_new_tokens": None}, 10).max_new_tokens > 1 << 29


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"json_schema": {}}, "json_schema"),
        ({"regex": "a*", "ebnf": 'root ::= "a"'}, "Only one of regex, json_schema, or ebnf"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
        ({"stop_regex": "a"}, "stop_regex"),
        ({"tempratur": 1}, "tempratur"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"logit_bias": {"99": 1}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"n": 0}, "n must be"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"sampling_seed": "x"}, "sampling_seed"),
    ],
)
def test_unsupported_parameter_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse_sampling_params(body, 10)
