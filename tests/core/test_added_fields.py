"""A field is added to a body, or replaced, without parsing it: everything else stays byte for byte."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import BadRequest, Request

NUMBER = 123456789012345678901234567890  # which no float holds


def request(body: bytes) -> Request:
    return Request("POST", b"/generate", [], body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"rid":"a"}'),
        (b" {\n } ", b' {\n "rid":"a"} '),
        (b'{"text": "x"}', b'{"rid":"a","text": "x"}'),
        (b'\r\n{\t"n": %d}' % NUMBER, b'\r\n{\t"rid":"a","n": %d}' % NUMBER),
    ],
)
def test_the_field_comes_first_and_nothing_else_changes(body: bytes, expected: bytes) -> None:
    asked = request(body)
    asked.add_field(b'"rid":"a"')
    assert asked.body == expected


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())), st.booleans())
def test_body_that_is_read_equals_the_body_that_is_sent(content: dict[str, object], parsed: bool) -> None:
    content.pop("rid", None)
    asked = request(json.dumps(content).encode())
    if parsed and all(not isinstance(value, int) or abs(value) < 1 << 60 for value in content.values()):
        asked.json()
    asked.add_field(b'"rid":["a",1]')
    assert json.loads(asked.body) == {"rid": ["a", 1], **content}
    if parsed:
        assert orjson.loads(orjson.dumps(asked.json())).get("rid") == ["a", 1]


def test_a_body_that_a_plugin_has_replaced_gets_it_too() -> None:
    asked = request(b"{}")
    mine = {"text": "x"}
    asked.replace_json(mine)
    asked.add_field(b'"rid":"a"')
    assert orjson.loads(asked.body) == {"rid": "a", "text": "x"}
    assert mine == {"text": "x"}  # which others may hold


@pytest.mark.parametrize("body", [b"", b"[]", b'"text"', b"null", b"x{}"])
def test_body_that_is_no_object_cannot_have_a_field(body: bytes) -> None:
    asked = request(body)
    with pytest.raises(BadRequest):
        asked.add_field(b'"rid":"a"')
    assert asked.body == body


@pytest.mark.parametrize("beginning", [b'{"text":"', b' { "text":"'])
def test_a_large_body_is_copied_once(beginning: bytes) -> None:
    asked = request(b'%b%b"}' % (beginning, b"x" * (8 << 20)))
    tracemalloc.start()
    asked.add_field(b'"rid":"a"')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 << 20


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())), st.booleans())
def test_a_field_that_was_added_is_replaced_and_nothing_else(
    content: dict[str, object], parsed: bool
) -> None:
    content.pop("rid", None)
    one, other = (request(json.dumps(content).encode()) for _ in range(2))
    one.add_field(b'"rid":"a"')
    other.add_field(b'"rid":"longer"')
    if parsed:
        one.json()
    one.replace_field(b'"rid":"a"', b'"rid":"longer"')
    assert one.body == other.body
    assert one.json() == other.json()


def test_the_field_of_a_replaced_body_is_replaced_too() -> None:
    asked = request(b"{}")
    mine = {"rid": "a", "ids": np.array([1, 2])}
    asked.replace_json(mine)
    asked.replace_field(b'"rid":"a"', b'"rid":"b"')
    assert asked.body == b'{"rid":"b","ids":[1,2]}'
    assert asked.json()["rid"] == "b"
    assert asked.json()["ids"] is mine["ids"]
    assert mine["rid"] == "a"  # which others may hold
