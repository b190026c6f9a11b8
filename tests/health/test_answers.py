"""The version that an answer names, found in its bytes."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_health.answers import NamedVersion, named_in


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"meta_info":{"weight_version":"7"}}', "7"),
        (b'{"meta_info": {"weight_version": "step-7"}}', "step-7"),
        (b'{"meta_info":{"weight_version":7}}', "7"),
        (b'[{"meta_info":{"weight_version":"6"}},{"meta_info":{"weight_version":"7"}}]', "7"),
        (b'{"weight_version":"7","weight_versions":[{"version":"6","start":0,"end":1}]}', "7"),
        (b'{"meta_info":{"weight_version":null}}', None),
        (b'{"meta_info":{"weight_version":"a\\u0062"}}', None),
        (b'{"meta_info":{"weight_version":"7', None),
        (b'{"weight_version":"' + b"7" * 257 + b'"}', None),
        (b'{"weight_versions":"7"}', None),
        (b"", None),
    ],
)
def test_version_in_an_answer(body: bytes, version: str | None) -> None:
    assert named_in(body, b"?") == version


@given(
    st.text(),
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters='"\\'), min_size=1, max_size=64),
)
def test_no_text_passes_for_a_version(text: str, version: str) -> None:
    tricky = f'{text}"weight_version":"9"{text}'
    escaped = orjson.dumps({"text": tricky, "list": [tricky]})
    assert named_in(escaped, b"?") is None
    if version.isprintable():
        assert named_in(orjson.dumps({"weight_version": version, "text": tricky}), b"?") == version


def heard(*pieces: bytes, expected: str = "7") -> list[str]:
    told: list[str] = []
    tap = NamedVersion(told.append, b'"%b"' % expected.encode())
    for piece in pieces:
        tap.feed(piece)
    assert told == []
    tap.close(complete=True)
    return told


def test_tap_tells_the_last_version_of_a_stream() -> None:
    events = [b'data: {"weight_version":"%d"}\n\n' % number for number in (6, 7, 8)]
    assert heard(*events, b"data: [DONE]\n\n") == ["8"]
    large = b'data: {"weight_version":"9","text":"' + b"a" * 100_000
    assert heard(*events, large, b'"}\n\n') == ["9"]


def test_tap_says_nothing_of_the_version_that_is_expected_or_of_none() -> None:
    assert heard(b'{"weight_version":"7"}') == []
    assert heard(b'{"weight_version": "6"}', expected="6") == [
        "6"
    ]  # spelt in another way: told, and compared there
    assert heard(b'{"weight_version":"7', b'"}', expected="8") == []
    assert heard(b"{}") == []


def test_bytes_behind_the_version_of_a_large_answer_are_not_searched() -> None:
    head, logprobs = b'{"weight_version":"6","logprobs":[', b'"weight_version":"9"' + b"[0.1,2]," * 10_000
    assert heard(head, logprobs, b"]}") == ["6"]
