"""JSON bodies of requests, as hooks read them."""

from __future__ import annotations

import pytest

from router_core.errors import BadRequest
from router_core.request import LARGE_BYTES, Request


def request(body: bytes) -> Request:
    return Request("POST", b"/generate", [], body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff"])
def test_body_that_is_no_object_is_none(body: bytes) -> None:
    assert request(body).json_object_or_none() is None


def test_body_that_is_an_object_is_parsed_once() -> None:
    one = request(b'{"text":"Hi"}')
    assert one.json_object_or_none() == {"text": "Hi"}
    assert one.json_object_or_none() is one.json()


def test_body_that_is_no_json_still_raises_when_it_is_read_strictly() -> None:
    one = request(b"{")
    assert one.json_object_or_none() is None
    with pytest.raises(BadRequest, match="the body is not JSON"):
        one.json()


@pytest.mark.parametrize("size", [2, LARGE_BYTES])
def test_value_in_place_of_a_large_body_is_encoded_later(size: int) -> None:
    one = request(b" " * size)
    one.replace_json({1, 2})
    if size < LARGE_BYTES:
        with pytest.raises(TypeError, match="set"):
            one.encode_for("a")
    else:
        one.encode_for("a")
        with pytest.raises(TypeError, match="set"):
            _ = one.body
