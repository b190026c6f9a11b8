"""Figures of an engine's answer that contradict each other or the request."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slime_sglang import contradiction

IDS = [11, 1, 13]


def answer(**meta: Any) -> dict[str, Any]:
    """Return SGLang's answer with three sampled tokens behind four."""
    return {
        "text": "abc",
        "output_ids": list(IDS),
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "weight_version": "7",
            "output_token_logprobs": [[-0.5, 11, None], [0.0, 1, None], [-1.5, 13, "c"]],
            **meta,
        },
    }


def fault(told: dict[str, Any]) -> str | None:
    return contradiction(told, prompt_tokens=4, rid="r1")


def test_a_whole_answer_contradicts_nothing() -> None:
    told = answer(
        weight_versions=[{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    )
    before = copy.deepcopy(told)
    assert fault(told) is None
    assert told == before


@pytest.mark.parametrize(
    "name",
    ["id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "output_token_logprobs"],
)
def test_a_missing_figure_contradicts_nothing(name: str) -> None:
    told = answer()
    del told["meta_info"][name]
    assert fault(told) is None
    assert fault(answer(**{name: None})) is None


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"meta_info": {}},
        {"meta_info": {"finish_reason": {"type": "abort", "message": "bare"}}},
        {"text": "", "output_ids": [], "meta_info": {"id": "r1", "completion_tokens": 0}},
        {
            "text": "",
            "output_ids": [],
            "meta_info": {"weight_versions": [{"version": "7", "start": 0, "end": 0}]},
        },
        {"text": "abc", "output_ids": IDS, "meta_info": {"output_token_logprobs": []}},
        {
            "text": "abc",
            "meta_info": {"output_token_logprobs": answer()["meta_info"]["output_token_logprobs"]},
        },
        {"text": "abc", "meta_info": {"completion_tokens": 3, "weight_versions": []}},
        {"output_ids": IDS, "meta_info": {"output_token_logprobs": [[None, 11], [-1, 1], [-0.5, 13]]}},
    ],
)
def test_omissions_of_aborts_and_old_engines_contradict_nothing(told: dict[str, Any]) -> None:
    assert fault(told) is None


def test_unknown_figures_are_not_compared() -> None:
    assert contradiction(answer(prompt_tokens=9, id="r9"), prompt_tokens=None, rid=None) is None


TRIPLES = answer()["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "r2"),
        ("id", 1),
        ("finish_reason", "stop"),
        ("prompt_tokens", 5),
        ("prompt_tokens", "4"),
        ("prompt_tokens", 4.0),
        ("completion_tokens", 9),
        ("completion_tokens", 0),
        ("completion_tokens", "3"),
        ("completion_tokens", 3.0),
        ("completion_tokens", True),
        ("output_token_logprobs", TRIPLES[:2]),
        ("output_token_logprobs", [*TRIPLES, TRIPLES[0]]),
        ("output_token_logprobs", [TRIPLES[0], [-0.5, 12, None], TRIPLES[2]]),
        ("output_token_logprobs", [TRIPLES[0], ["-0.5", 1, None], TRIPLES[2]]),
        ("output_token_logprobs", [-0.5, -0.5, -0.5]),
        ("output_token_logprobs", {"a": 1}),
        ("output_token_logprobs", [[-0.5], [-0.5], [-0.5]]),
        ("output_token_logprobs_length", 2),
        ("weight_version", ["7"]),
        ("weight_version", True),
        ("weight_versions", "7"),
        ("weight_versions", [{"version": "7", "start": 0, "end": 2}]),
        ("weight_versions", [{"version": "7", "start": 0, "end": 4}]),
        ("weight_versions", [{"version": "7", "start": 1, "end": 3}]),
        ("weight_versions", [{"version": "7", "start": 0, "end": 0}, {"version": "8", "start": 0, "end": 3}]),
        ("weight_versions", [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 3}]),
        ("weight_versions", [{"version": "7", "start": False, "end": 3}]),
        ("weight_versions", [{"version": ["7"], "start": 0, "end": 3}]),
        ("weight_versions", ["7"]),
    ],
)
def test_a_contradictory_figure_is_named(name: str, value: Any) -> None:
    assert fault(answer(**{name: value})) == name


@pytest.mark.parametrize(("version", "named"), [("7", None), (None, None), ("6", "weight_version")])
def test_version_is_that_of_the_last_span(version: str | None, named: str | None) -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    assert fault(answer(weight_version=version, weight_versions=spans)) == named


@pytest.mark.parametrize(
    "ids",
    ["11", [11, "1", 13], [11, 1.0, 13], [11, True, 13], [11, None, 13], [11, -1, 13], [11, 1 << 40, 13]],
)
def test_ids_of_a_wrong_type_are_named(ids: Any) -> None:
    assert fault(answer() | {"output_ids": ids}) == "output_ids"


def test_the_bool_in_ids_is_found_in_logprobs_too() -> None:
    told = answer(output_token_logprobs=[[-0.5, 11, None], [0.0, True, None], [-1.5, 13, None]])
    del told["output_ids"]
    assert fault(told) == "output_token_logprobs"


def test_logprobs_alone_stand_for_the_ids_when_they_are_all() -> None:
    told = answer()
    del told["output_ids"]
    assert fault(told) is None
    told["meta_info"]["output_token_logprobs"] = TRIPLES[:2]
    assert fault(told) == "completion_tokens"


def test_no_ids_for_a_count_are_named() -> None:
    assert (
        fault({"text": "abc", "output_ids": [], "meta_info": {"completion_tokens": 3}}) == "completion_tokens"
    )


@pytest.mark.parametrize(("name", "value"), [("text", 1), ("meta_info", [])])
def test_an_answer_of_another_shape_is_named(name: str, value: Any) -> None:
    assert fault(answer() | {name: value}) == name
