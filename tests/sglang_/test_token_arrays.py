"""Arrays in answers: cut out of JSON that comes in any pieces, decoded, and put back."""

from __future__ import annotations

import base64
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_sglang.array_cutter import ArrayCutter
from slime_sglang.bodies import parsed
from slime_sglang.token_arrays import TokenArray, array_in, encoded


def in_base64(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def values_of(text: str) -> list[int]:
    array = array_in(text)
    if array is None:
        raise ValueError("no base64")
    values: list[int] = array.values.tolist()
    return values


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (
            b'{"a":"b","routed_experts":"AAAA=","c":{"routed_experts": "A","routed_experts":[1,"x"]}}',
            b'{"a":"b","routed_experts":"","c":{"routed_experts": "","routed_experts":[1,"x"]}}',
        ),
        (
            b'{"text":"\\"routed_experts\\":\\"x","routed_experts" :"A","indexer_topk":null}',
            b'{"text":"\\"routed_experts\\":\\"x","routed_experts" :"A","indexer_topk":null}',
        ),
        (b'{"indexer_topk":"AA","routed_experts":""}', b'{"indexer_topk":"","routed_experts":""}'),
    ],
)
def test_json_in_any_pieces_is_cut_alike(body: bytes, rest: bytes) -> None:
    for first in range(len(body) + 1):
        for second in range(first, len(body) + 1):
            cutter = ArrayCutter(keeps=False)
            for piece in (body[:first], body[first:second], body[second:]):
                cutter.feed(piece)
            assert cutter.json() == rest


@given(
    st.lists(st.integers(0, 255) | st.integers(0, 65_535) | st.integers(-(2**31), 2**31 - 1)),
    st.lists(st.integers(0, 200), min_size=1),
    st.integers(0, 200),
)
def test_an_array_is_decoded_from_any_pieces(values: list[int], sizes: list[int], capacity: int) -> None:
    characters = in_base64(values).encode()
    array = TokenArray(capacity)
    position = 0
    for size in sizes:
        array.feed(characters[position : position + size])
        position += size
    array.feed(characters[position:])
    assert array.values.tolist() == values
    highest = max(values, default=0) if min(values, default=0) >= 0 else 1 << 31
    assert array.values.dtype.itemsize == (1 if highest < 1 << 8 else 2 if highest < 1 << 16 else 4)


def test_an_array_of_stated_size_is_in_memory_once() -> None:
    body = b'{"meta_info":{"routed_experts":"%b"}}' % in_base64([7, 0, 255] * 500_000).encode()
    tracemalloc.start()  # numpy's memory, too
    cutter = ArrayCutter(keeps=True, array_bytes=len(body))
    for start in range(0, len(body), 1 << 16):
        cutter.feed(body[start : start + (1 << 16)])
    array = array_in(cutter.put_back(orjson.loads(cutter.json()))["meta_info"]["routed_experts"])
    assert array is not None
    assert len(array.values) == 1_500_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_900_000


@pytest.mark.parametrize(
    ("highest", "kind"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.int32)]
)
def test_an_array_has_the_narrowest_type(highest: int, kind: type) -> None:
    values = [0, 1, highest] * 50_000
    array = array_in(in_base64(values))
    assert array is not None
    assert array.values.dtype == kind
    assert array.values.tolist() == values
    assert encoded(array.values) == in_base64(values)


def test_a_negative_value_stays_int32() -> None:
    array = array_in(in_base64([-1, 5]))
    assert array is not None
    assert array.values.dtype == np.int32
    assert array.values.tolist() == [-1, 5]


@pytest.mark.parametrize(
    "wrong", ["AAA", "AAAA", "AAAAAA==AAAA", "AA-_AAAAAAAA", "AAAAAA==" * 100, "\u00e4AAAAA=="]
)
def test_what_is_no_base64_of_int32_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"base64|digit|padding"):
        values_of(wrong)


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_document_has_its_arrays_again(size: int) -> None:
    values = list(range(size))
    meta: dict[str, Any] = {
        "routed_experts": in_base64(values),
        "indexer_topk": in_base64(values[:3]),
        "x": 1,
    }
    body = orjson.dumps([{"meta_info": meta, "routed_experts": "kept as it is"[:0]}, {"meta_info": {}}])
    first, second = parsed(body, keeps_arrays=True)
    for name, wanted in (("routed_experts", values), ("indexer_topk", values[:3])):
        array = array_in(first["meta_info"][name])
        assert array is not None
        assert array.values.tolist() == wanted
    assert (first["meta_info"]["x"], second) == (1, {"meta_info": {}})


def test_an_array_that_is_broken_in_a_large_body_is_left_out() -> None:
    body = orjson.dumps({"meta_info": {"routed_experts": "!" * 100_000}})
    assert parsed(body, keeps_arrays=True) == {"meta_info": {"routed_experts": ""}}
