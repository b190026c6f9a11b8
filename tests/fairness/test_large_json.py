"""JSON in pieces is what orjson makes of the whole, or is refused where orjson refuses it."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router_core.errors import BadRequest
from router_core.request import Request
from slime_fairness.large_json import InvalidJson, TooManyValues, as_numpy, dump, parse

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(alphabet='ab,:"\\\\[]{}é☔😀\n\u0001 ', max_size=30),
)
_KEYS = st.text(alphabet='ab"\\\\,{', max_size=3)
_DOCUMENTS = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(_KEYS, inner, max_size=6),
    max_leaves=60,
)


def run(steps: Any) -> Any:
    """Run ``steps``, and return their result and their number."""
    number = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, number
        number += 1


def plain(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value, as_numpy, orjson.OPT_SERIALIZE_NUMPY))


@settings(max_examples=150, deadline=None)
@given(
    document=_DOCUMENTS,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
    piece=st.sampled_from([1, 2, 3, 7, 20, 100]),
    edit=st.none() | st.tuples(st.integers(0), st.sampled_from(["", *'[]{},:"\\ 1']), st.booleans()),
)
@example([{"a": [1, 2], "b": 3}, [4]], True, None, 1, None)
@example(['\\\\"' * 40, "x"], True, None, 3, None)
def test_pieces_make_what_the_whole_makes(
    document: Any, ascii_only: bool, indent: int | None, piece: int, edit: tuple[int, str, bool] | None
) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    if edit is not None:  # most of these are no JSON any more
        place = edit[0] % len(text)
        text = text[:place] + edit[1].encode() + text[place + edit[2] :]
    try:
        whole = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(InvalidJson):
            run(parse(text, piece=piece))
        return
    made, _ = run(parse(text, piece=piece))
    assert orjson.dumps(made) == orjson.dumps(whole)


def test_a_repeated_key_has_its_last_value() -> None:
    text = b'{"a": [1, 2, 3], "b": [4, 5], "a": [6, 7, 8, 9], "c": {"a": [1, 2], "a": {"d": [3, 4]}}}'
    for piece in range(1, 60):
        assert run(parse(text, piece=piece))[0] == orjson.loads(text)


@pytest.mark.parametrize(
    "document", [{"input_ids": [5] * 9000}, {"input_ids": [[70000] * 5000, [1], [2] * 50_000]}]
)
def test_long_lists_of_ids_are_arrays(document: Any) -> None:
    made, steps = run(parse(orjson.dumps(document)))
    long = [one for one in (made["input_ids"], *made["input_ids"][:3]) if isinstance(one, array)]
    assert long
    assert plain(made) == document
    assert run(parse(orjson.dumps(document), packs=False))[0] == document
    assert steps >= len(orjson.dumps(document)) // 2**16


@pytest.mark.parametrize("stranger", [True, 1.5, None, "1", 2**31, [], {}])
@pytest.mark.parametrize("place", [0, 20_000, 49_999])
def test_a_list_with_anything_else_stays_a_list(stranger: Any, place: int) -> None:
    document = [[*range(place), stranger, *range(place + 1, 50_000)]]
    made, _ = run(parse(orjson.dumps(document)))
    assert type(made[0]) is list
    assert orjson.dumps(made) == orjson.dumps(document)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (b"[" + b"[]," * 70_000 + b"1]", 65_536),
        (b'["' + b'","' * 70_000 + b'"]', 65_536),
        (b"[" + b'{"a":"%b"},' % (b"x" * 40) * 80_000 + b"1]", 122_500),  # 49 bytes and 3 values each
        (b'["' + (b"x" * 40 + b'","') * 300_000 + b'"]', 1 << 18),
    ],
)
def test_json_with_too_many_values_is_refused_before_it_is_parsed(text: bytes, most: int) -> None:
    tracemalloc.start()
    with pytest.raises(TooManyValues, match=f"wanted at most {most} strings, lists and objects in a body of"):
        run(parse(text))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    made, _ = run(parse(text, is_limited=False))
    assert made == orjson.loads(text)


def test_json_of_too_many_levels_is_refused() -> None:
    with pytest.raises(InvalidJson, match="nested too deeply"):
        run(parse(b"[" * 70_000))


@pytest.mark.parametrize("letters", ["x", '\\"', "日本", "a😀\n", "line of a text\n", "\u0001é "])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_string_takes_few_steps(letters: str, ascii_only: bool) -> None:
    long = letters * (1_000_000 // len(letters))
    documents = [
        {"a": long, "b": [1, {"c": long}]},
        [long, "x", long],
        {long: {"a": 1, "b": {long: [2, 3]}}},
        long,
    ]
    for document in documents:
        text = json.dumps(document, ensure_ascii=ascii_only).encode()
        made, steps = run(parse(text))
        assert made == document
        assert 0 < steps < 20 + len(text) // 16_000


def test_a_long_string_may_be_as_deep_as_any() -> None:
    for opener, closer in ((b"[", b"]"), (b'{"a":', b"}")):
        text = opener * 1020 + b'"%b"' % (b"x" * 1_000_000) + closer * 1020
        made, _ = run(parse(text))
        for _ in range(1020):
            [made] = made if isinstance(made, list) else made.values()
        assert made == "x" * 1_000_000


@pytest.mark.parametrize("broken", [b"\xff", b"\x01", b"\\x", b"\\ud800 "])
@pytest.mark.parametrize("place", [40, 2_000_000, 3_999_980])
def test_a_long_string_that_is_none_is_refused(broken: bytes, place: int) -> None:
    text = b'{"a":"%b"}' % (b"text " * 800_000)
    text = text[:place] + broken + text[place:]
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(text)
    with pytest.raises(InvalidJson):
        run(parse(text))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"text": "a", "n": [1, {"b": None}]},
        {"input_ids": np.arange(70_000, dtype=np.int32), "stream": False},
        {"input_ids": array("i", [5, 6])},
        {"input_ids": [np.arange(3, dtype=np.int32), np.arange(40_000, dtype=np.int32)], "a": []},
        {"sampling_params": {"stop_token_ids": array("i", [5, 6])}},
    ],
)
def test_json_written_in_pieces_equals_orjsons(value: dict[str, Any]) -> None:
    assert run(dump(value))[0] == orjson.dumps(value, as_numpy, orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.parametrize("number", [2_500, 4_000, 5_000, 30_000])
@pytest.mark.parametrize("end", ["", "1.5,"])
def test_a_key_that_is_repeated_behind_a_long_list_has_its_last_value(number: int, end: str) -> None:
    ids = "7," * number + end + "8"
    text = b'{"a":[%b],"a":5,"b":1}' % ids.encode()
    for piece in range(len(text) // 2, len(text) + 2, 999):
        assert run(parse(text, piece=piece))[0] == {"a": 5, "b": 1}


LETTERS = 3_000_000


@pytest.mark.parametrize("before", [LETTERS, *range((1 << 20) - 20, (1 << 20) + 4)])
@pytest.mark.parametrize("key", [b'"session_id"', rb'"session_i\u0064"'])
def test_a_name_is_found_wherever_it_stands(before: int, key: bytes) -> None:
    """Also where one piece of the search ends and the next begins."""
    body = b'{"a":"%b",%b:"b","c":"%b"}' % (b"a" * before, key, b"c" * (LETTERS - before))
    request = Request("POST", b"/generate", [], body)
    assert run(request.searching(b"rid", b"session_id"))[0]
    assert request.may_have(b"session_id")


def test_names_that_are_not_there_are_searched_once_and_in_pieces() -> None:
    request = Request("POST", b"/generate", [], b'{"text":"%b"}' % (b"a" * LETTERS))
    found, steps = run(request.searching(b"rid", b"n"))
    assert not found
    assert steps == 3
    assert not request.may_have(b"rid")
    assert not request.may_have(b"n")
    request.add_field(b'"rid":"one"')
    assert request.may_have(b"rid")
    assert not request.may_have(b"n")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"[" + b"[]," * (1 << 19) + b"[]]", "wanted at most 65536 strings, lists and objects"),
        (b'{"a":' + b"1," * (1 << 20), "the body is not JSON that can be read"),
    ],
)
def test_a_large_body_that_was_found_to_be_none_is_not_searched_again(body: bytes, fault: str) -> None:
    """Nobody who asks for a name waits for a search: who reads it is told what is wrong."""
    request = Request("POST", b"/generate", [], body)
    assert not request.may_have(b"rid")
    run(request.reading())
    assert request.may_have(b"rid")
    with pytest.raises(BadRequest, match=fault):
        request.json()
