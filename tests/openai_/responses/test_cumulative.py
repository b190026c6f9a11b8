"""The new text of events that repeat all before."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_openai.responses.cumulative import GrowingText


def an_event(text: str, count: int, reason: Any = None) -> bytes:
    meta = {"finish_reason": reason, "completion_tokens": count}
    return orjson.dumps({"text": text, "output_ids": list(range(count)), "meta_info": meta})


@given(st.lists(st.text('ab"\\\n\t😀é\x00"finish_reason":null', max_size=5), min_size=1, max_size=8))
def test_new_text_is_right_for_any_text(pieces: list[str]) -> None:
    growing, text = GrowingText(), pieces[0]
    growing.remember(an_event(text, 1))
    for count, piece in enumerate(pieces[1:], 2):
        text += piece
        event = an_event(text, count)
        assert growing.is_next(event)
        assert growing.next(event) == piece


@pytest.mark.parametrize(
    "event",
    [
        an_event("ab", 2, {"type": "stop"}),
        an_event("xb", 2),
        orjson.dumps({"index": 0, "text": "ab", "meta_info": {"finish_reason": None}}),
        b'{"text": "ab", "meta_info": {"finish_reason": null}}',
    ],
    ids=["last", "other text", "other order", "spaces"],
)
def test_anything_else_is_to_be_parsed(event: bytes) -> None:
    growing = GrowingText()
    growing.remember(an_event("a", 1))
    assert not growing.is_next(event)


def test_before_the_first_event_was_parsed_nothing_is_known() -> None:
    growing = GrowingText()
    growing.remember(b"[]")
    assert not growing.is_next(an_event("a", 1))
