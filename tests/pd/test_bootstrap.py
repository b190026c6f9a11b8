"""Bootstrap fields for the two workers, spliced into the bytes of the request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router_core import BadRequest, Worker
from router_core.request import Request
from slime_pd.bootstrap import bootstrap_fields, may_be_many, sequences
from slime_sglang.generation import generates, with_fields


def fields(
    body: Any, path: str = "/generate", url: str = "http://10.0.0.7:30001", port: int | None = 8998
) -> Any:
    text = body if isinstance(body, bytes) else orjson.dumps(body)
    prefill = Worker(url, "prefill", {"bootstrap_port": port})
    try:
        number = sequences(orjson.loads(text), path) if may_be_many(text) else None
    except orjson.JSONDecodeError:
        number = None
    return orjson.loads(b"{%b}" % bootstrap_fields(number, prefill))


def count(body: Any, path: str = "/generate") -> int | None:
    """The rooms; None for a single one. They are all different, below 2**63, and everything has the same length."""
    told = fields(body, path)
    rooms = told["bootstrap_room"]
    if isinstance(rooms, int):
        assert isinstance(told["bootstrap_host"], str)
        assert told["bootstrap_port"] == 8998
        return None
    assert len(set(rooms)) == len(rooms)
    assert all(0 <= room < 1 << 63 for room in rooms)
    assert told["bootstrap_host"] == ["10.0.0.7"] * len(rooms)
    assert told["bootstrap_port"] == [8998] * len(rooms)
    return len(rooms)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, 1),
        ({"text": ["a", "b"]}, 2),
        ({"text": []}, None),
        ({"input_ids": [1, 2, 3]}, None),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"input_ids": []}, None),
        ({"input_embeds": [[0.1], [0.2]]}, None),
        ({"input_embeds": [[[0.1]], [[0.2]]]}, 2),
        ({"text": "a", "sampling_params": {"n": 1}}, None),
        ({"text": "a", "sampling_params": {"n": 3}}, 3),
        ({"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        ({"text": "a", "n": 3}, None),  # not SGLang's place for it
        ({"text": '"text":["a"]'}, None),
        ({"text": "a", "sampling_params": {"n": 1 << 40}}, None),  # SGLang counts on from the one room
        (b'{"text": ["a", ', None),
        (b'["text"]', None),
    ],
)
def test_sequences_of_generate_are_counted_as_sglang_does(body: Any, wanted: int | None) -> None:
    assert count(body) == wanted


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/completions", {"prompt": "a"}, None),
        ("/v1/completions", {"prompt": [1, 2, 3]}, None),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": ["a"]}]}]}, None),
        ("/v1/chat/completions", {"messages": [], "n": 2}, 2),
    ],
)
def test_sequences_of_openai_requests_are_counted_too(path: str, body: Any, wanted: int | None) -> None:
    assert count(body, path) == wanted


def test_the_host_is_the_prefill_workers_and_the_port_may_be_none() -> None:
    assert fields({"text": "a"}, port=None)["bootstrap_port"] is None
    assert fields({"text": "a"}, url="https://prefill.local")["bootstrap_host"] == "prefill.local"
    assert fields({"text": "a"}, url="http://[fd00::7]:8000")["bootstrap_host"] == "[fd00::7]"


def test_rooms_differ_from_request_to_request() -> None:
    assert len({fields({"text": "a"})["bootstrap_room"] for _ in range(100)}) == 100


# splicing


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"a":1}', b'{"a":1,"b":2}'),
        (b' { "a" : 1e-5 }\n', b' { "a" : 1e-5 ,"b":2}'),
        (b"{}", b'{"b":2}'),
        (b"{ \n}", b'{ \n"b":2}'),
        (b'{"a":{}}', b'{"a":{},"b":2}'),
        (b'{"b":1,"a":0.10}', b'{"b":2,"a":0.1}'),
        (b'{"a":{"b":1}}', b'{"a":{"b":1},"b":2}'),
    ],
)
def test_fields_are_put_behind_what_is_there(body: bytes, wanted: bytes) -> None:
    assert with_fields(body, b'"b":2') == wanted


def test_a_name_in_disguise_does_not_win() -> None:
    """A client that may not say where an engine connects to cannot spell it otherwise."""
    body = with_fields(rb'{"bootstrap\u005fhost":"evil"}', b'"bootstrap_host":"good"')
    assert orjson.loads(body) == {"bootstrap_host": "good"}


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'"a"', b"{", b'[{"b":1}]', b'{"b":'])
def test_body_that_is_no_object_gets_no_fields(body: bytes) -> None:
    with pytest.raises(BadRequest):
        with_fields(body, b'"b":2')


@pytest.mark.parametrize(
    ("method", "target", "wanted"),
    [
        ("POST", b"/generate", True),
        ("POST", b"/generate?x=1", True),
        ("POST", b"/%67enerate", True),
        ("POST", b"/v1/chat/completions", True),
        ("PUT", b"/generate", True),
        ("PUT", b"/%67enerate?x=1", True),
        ("PUT", b"/v1/chat/completions", False),
        ("GET", b"/generate", False),
        ("POST", b"/encode", False),
    ],
)
def test_what_generates(method: str, target: bytes, wanted: bool) -> None:
    assert generates(Request(method, target, [])) is wanted
