"""Merged answers: whatever the decode worker said stays, and what only the prefill worker knows is added."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.errors import WorkerBroke
from slime_pd.pd_merge import Prefilled


def told(**meta: Any) -> bytes:
    return orjson.dumps({"text": "x", "meta_info": meta})


def merged(first: bytes, second: bytes) -> dict[str, Any]:
    meta: dict[str, Any] = orjson.loads(Prefilled.whole(first).merge(second))["meta_info"]
    return meta


@given(st.binary(max_size=40), st.binary(max_size=60))
def test_bytes_of_experts_are_overlaid_as_if_they_had_been_decoded(first: bytes, second: bytes) -> None:
    wire = [base64.b64encode(each).decode() for each in (first, second)]
    meta = merged(told(routed_experts=wire[0]), told(routed_experts=wire[1]))
    whole = base64.b64decode(meta["routed_experts"], validate=True)
    assert whole == first + second[len(first) :]


def test_logprobs_of_the_prompt_come_first() -> None:
    first, second = [[None, 1, None], [-0.5, 2, None]], [[-1e-7, 3, None]]
    meta = merged(told(input_token_logprobs=first), told(input_token_logprobs=second, output_ids=[3]))
    assert meta == {"input_token_logprobs": first + second, "output_ids": [3]}


def test_missing_members_are_not_made_up() -> None:
    assert merged(told(input_token_logprobs=[[-1, 1, None]]), told()) == {}
    assert merged(told(), told(input_token_logprobs=[])) == {"input_token_logprobs": []}


def rows(count: int, sampled: int, start: int = 0) -> bytes:
    wire = base64.b64encode(bytes(12 * count)).decode()
    figures = {"prompt_tokens": 5, "completion_tokens": sampled, "routed_experts_start_len": start}
    return told(routed_experts=wire, **figures)


def test_experts_that_cannot_be_joined_are_left_out() -> None:
    whole = merged(rows(5, 1), rows(8, 4))
    assert len(base64.b64decode(whole["routed_experts"])) == 12 * 8
    for first in (told(), told(routed_experts=None), rows(4, 1), rows(6, 1), rows(3, 1, start=2)):
        assert "routed_experts" not in merged(first, rows(8, 4))
    assert Prefilled.whole(told()).adds_to(rows(8, 4))


SPANS = [
    # completion_tokens, the decode worker's spans, what is told
    (0, None, None),
    (1, None, [("6", 0, 1)]),
    (3, None, [("6", 0, 1), ("7", 1, 3)]),
    (3, [("7", 0, 3)], [("6", 0, 1), ("7", 1, 3)]),
    (3, [("7", 0, 1), ("8", 1, 3)], [("6", 0, 1), ("8", 1, 3)]),
    (3, [("7", 0, 2), ("8", 2, 3)], [("6", 0, 1), ("7", 1, 2), ("8", 2, 3)]),
    (3, [("6", 0, 2), ("7", 2, 3)], [("6", 0, 2), ("7", 2, 3)]),
]


def spans(told: list[tuple[str, int, int]] | None) -> dict[str, Any]:
    if told is None:
        return {}
    return {"weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in told]}


@pytest.mark.parametrize(("count", "theirs", "wanted"), SPANS)
def test_the_first_token_is_told_to_be_of_the_prefill_workers_version(
    count: int, theirs: list[tuple[str, int, int]] | None, wanted: list[tuple[str, int, int]] | None
) -> None:
    about = {"weight_version": "7", "completion_tokens": count}
    meta = merged(told(weight_version="6"), told(**about, **spans(theirs)))
    assert meta == {**about, **spans(wanted)}


def test_first_token_has_its_own_version_after_an_update_of_prefill() -> None:
    first = told(weight_version="7", weight_versions=[{"version": "6", "start": 0, "end": 1}])
    second = told(weight_version="7", completion_tokens=3)
    assert Prefilled.whole(first).adds_to(second)
    assert merged(first, second)["weight_versions"] == spans([("6", 0, 1), ("7", 1, 3)])["weight_versions"]


def test_spans_that_are_not_understood_do_not_look_like_the_whole_truth() -> None:
    meta = merged(
        told(weight_version="6"), told(weight_version="7", completion_tokens=3, weight_versions="all")
    )
    assert meta["weight_versions"] == [{"version": "6", "start": 0, "end": 1}]


@pytest.mark.parametrize(
    ("first", "second", "adds"),
    [
        (told(weight_version="7"), told(weight_version="7"), False),
        (told(weight_version="7"), b'{"meta_info": {"weight_version" : "7"}}', False),
        (told(weight_version="7"), told(weight_version="8"), True),
        (told(weight_version="7"), told(), True),
        (told(weight_version=None), told(weight_version=None), False),
        (told(), told(weight_version="8"), False),
        (told(weight_version="7"), told(weight_version="7", weight_versions=[]), True),
        (told(weight_version="7", input_token_logprobs=[]), told(weight_version="7"), True),
        (told(weight_version="7", routed_experts=""), told(weight_version="7"), True),
        (b'["7"', told(weight_version="7"), False),
        (b'{"id": 1}', b'{"id": 1}', False),
        # A text cannot pass for a version: in it the quotes are escaped.
        (told(weight_version="7"), orjson.dumps({"text": '"weight_version":"7"'}), True),
    ],
)
def test_an_answer_is_parsed_only_when_something_is_to_be_put_into_it(
    first: bytes, second: bytes, adds: bool
) -> None:
    assert Prefilled.whole(first).adds_to(second) is adds


def test_each_output_of_a_batch_gets_its_own() -> None:
    def outputs(*metas: dict[str, Any]) -> bytes:
        return orjson.dumps([{"meta_info": meta} for meta in metas])

    first = outputs({"input_token_logprobs": [[-1, 1, None]]}, {"input_token_logprobs": [[-2, 2, None]]})
    second = outputs(*[{"input_token_logprobs": []}] * 3)
    whole = orjson.loads(Prefilled.whole(first).merge(second))
    assert [each["meta_info"]["input_token_logprobs"] for each in whole] == [
        [[-1, 1, None]],
        [[-2, 2, None]],
        [],
    ]


def test_events_are_completed_by_their_index() -> None:
    def event(index: int, **meta: Any) -> bytes:
        return orjson.dumps({"index": index, "meta_info": meta})

    stream = b"".join(
        b"data: %b\n\n" % data
        for data in (event(1, input_token_logprobs=[1]), event(0, weight_version="6"), b"[DONE]")
    )
    prefilled = Prefilled.streamed(stream)
    assert orjson.loads(prefilled.merge_event(event(1, input_token_logprobs=[2])))["meta_info"] == {
        "input_token_logprobs": [1, 2]
    }
    assert prefilled.merge_event(b"[DONE]") == b"[DONE]"
    assert prefilled.merge_event(b"{") == b"{"
    assert orjson.loads(prefilled.merge_event(b'{"error": {"message": "no"}}')) == {
        "error": {"message": "no"}
    }


def test_first_event_of_one_sequence_tells_nothing_of_the_others() -> None:
    """The second one may begin after an update of the decode worker."""

    def event(index: int, version: str) -> bytes:
        meta = {"weight_version": version, "completion_tokens": 2}
        return b"data: %b\n\n" % orjson.dumps({"index": index, "meta_info": meta})

    assert Prefilled.streamed(event(0, "6") + event(1, "6")).adds_to_stream(event(0, "6"))
    assert not Prefilled.streamed(event(0, "6")).adds_to_stream(event(0, "6"))
    assert not Prefilled({0: {}, 1: {}}).adds_to_stream(event(0, "6"))


def test_a_prefill_that_ends_its_stream_with_an_error_has_failed() -> None:
    with pytest.raises(WorkerBroke, match="with an error"):
        Prefilled.streamed(b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n')


def test_experts_that_are_no_base64_are_the_workers_fault() -> None:
    with pytest.raises(WorkerBroke, match="not base64"):
        merged(told(routed_experts="AAA"), told(routed_experts="AAAA"))


def test_an_answer_that_is_no_json_cannot_be_completed() -> None:
    with pytest.raises(WorkerBroke, match="not JSON"):
        Prefilled.whole(told(input_token_logprobs=[])).merge(b"<html>")
