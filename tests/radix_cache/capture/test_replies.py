"""Answers as SGLang writes them, and as it should not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from radix_cache.toy import pack
from slime_radix_cache.capture.replies import Output, Unusable, pack_logprobs, read_output
from slime_sglang.bodies import parsed
from slime_sglang.evidence import Columns


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]],
    }
    told = {"text": "ab", "output_ids": [1, 2], "meta_info": meta}
    for key, value in changes.items():
        (told if key in told else meta)[key] = value
    return told


def test_an_ordinary_answer() -> None:
    expected = Output(
        text="ab",
        ids=pack(1, 2),
        logprobs=pack_logprobs([-0.5, -0.25]),
        versions=(("7", 2),),
        reason={"type": "stop", "matched": 9},
        finish_reason='{"type":"stop","matched":9}',
        columns=Columns([-0.5, -0.25], [1, 2]),
    )
    assert read_output(answer()) == expected


def test_ids_are_taken_from_the_logprobs_of_engines_that_send_no_others() -> None:
    assert read_output(answer(output_ids=None)).ids == pack(1, 2)


@pytest.mark.parametrize(
    "logprobs",
    [
        [[-0.5, 1, None], [-0.25, 2, None]],
        [[-0.5, 1, None]],
        [[-0.5], [-0.25]],
        [["-0.5", 1, None], [-0.25, 3, None]],
        [5, 6],
        5,
    ],
)
def test_logprobs_of_other_tokens_are_not_believed(logprobs: Any) -> None:
    output = read_output(answer(output_ids=[1, 3], output_token_logprobs=logprobs))
    assert (output.ids, output.logprobs) == (pack(1, 3), None)


@pytest.mark.parametrize(
    ("version", "spans", "expected"),
    [
        (None, None, ((None, 2),)),
        (7, None, (("7", 2),)),
        (
            "8",
            [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
            (("7", 1), ("8", 1)),
        ),
        ("8", [{"version": "7", "start": 0, "end": 1}], ((None, 2),)),
        ("8", [{"version": "7", "start": 1, "end": 2}], ((None, 2),)),
        ("8", [{"version": "7"}], ((None, 2),)),
        ("8", [{"version": "7", "start": 0, "end": 2.0}], ((None, 2),)),
        ("8", 5, ((None, 2),)),
    ],
)
def test_versions_are_what_the_engine_says_and_nothing_else(version: Any, spans: Any, expected: Any) -> None:
    output = read_output(answer(weight_version=version, weight_versions=spans))
    assert output.versions == expected


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (None, "answer_not_understood"),
        ([], "answer_not_understood"),
        (answer(output_ids=["a"]), "answer_not_understood"),
        (answer(output_ids=[1 << 40]), "answer_not_understood"),
        (answer(output_ids=None, output_token_logprobs=[[-0.5]]), "answer_not_understood"),
        (answer(text="", output_ids=[], output_token_logprobs=[], completion_tokens=0), "nothing_sampled"),
        (answer(output_ids=[], output_token_logprobs=[], completion_tokens=0), "answer_without_ids"),
        (answer(text="", output_ids=[], completion_tokens=0), "answer_without_ids"),
        (answer(output_ids=None, output_token_logprobs=None), "answer_without_ids"),
        (answer(text=None), "answer_without_text"),
        ({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}, "nothing_sampled"),
    ],
)
def test_unrecordable_answer_is_named(told: Any, kind: str) -> None:
    with pytest.raises(Unusable) as caught:
        read_output(told)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([-0.5, -0.25], 8),
        ([-0.5, -0.1], 16),  # 0.1 is no float32
        ([-0.0, 0.0], 8),
        ([-1e300, -5e-324], 16),
        ([None, -0.5], 8),
        ([0, -1], 8),
    ],
)
def test_logprobs_are_narrow_only_where_nothing_is_lost(values: list[float | None], size: int) -> None:
    assert len(pack_logprobs(values)) == size


@pytest.mark.parametrize("space", [b"", b" ", b"\n  "])
def test_a_large_answer_is_parsed_without_its_experts(space: bytes) -> None:
    experts = b'"routed_experts":' + space + b'"' + b"QUJD" * 50_000 + b'"'
    text = b'"text": "\\"routed_experts\\":\\"stays\\""'
    body = b"[{%s, %s}, {%s}, {%s}]" % (text, experts, experts, b'"routed_experts": null, "a": 1')
    assert parsed(body) == [
        {"text": '"routed_experts":"stays"', "routed_experts": ""},
        {"routed_experts": ""},
        {"routed_experts": None, "a": 1},
    ]


def test_experts_that_do_not_end_are_no_json() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parsed(b'{"routed_experts":"' + b"QUJD" * 50_000)
