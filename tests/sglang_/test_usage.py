"""Numbers of tokens in the bytes of an answer, wherever the pieces end."""

from __future__ import annotations

import json

import pytest

from slime_sglang.usage import UsageTap

SGLANG = json.dumps({"text": 'x "y"', "meta_info": {"prompt_tokens": 12, "completion_tokens": 34}})
OPENAI = json.dumps(
    {"usage": {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}},
    indent=1,
)
ANTHROPIC = '{"usage":{"input_tokens":7,"output_tokens":8}}'
QUOTED = json.dumps({"text": SGLANG, "logprobs": [1, 2]})
CUT = '{"meta_info":{"prompt_tokens":123'


def read(body: str, size: int, *, numbered: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    tap = UsageTap(found.update, numbered=numbered)
    data = body.encode()
    for start in range(0, len(data), size):
        tap.feed(data[start : start + size])
    tap.close(True)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64, 65, 1000])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (SGLANG, {"prompt_tokens": 12, "completion_tokens": 34}),
        (f"[{SGLANG},{SGLANG}]", {"prompt_tokens": 24, "completion_tokens": 68}),
        (f"data: {SGLANG}\n\ndata: {SGLANG}\n\n", {"prompt_tokens": 12, "completion_tokens": 34}),
        (OPENAI, {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 4}),
        (ANTHROPIC, {"prompt_tokens": 7, "completion_tokens": 8}),
        (QUOTED, {}),
        (CUT, {}),
        ("", {}),
    ],
)
def test_numbers_are_found_in_pieces_of_any_size(body: str, found: dict[str, int], size: int) -> None:
    assert read(body, size) == found


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_numbers_of_several_streamed_sequences_stay_unknown(size: int) -> None:
    events = [f'data: {{"index": {place}, {SGLANG[1:]}\n\n' for place in (0, 1)]
    assert read("".join(events), size, numbered=True) == {}
    assert read(events[0], size, numbered=True) == {"prompt_tokens": 12, "completion_tokens": 34}
