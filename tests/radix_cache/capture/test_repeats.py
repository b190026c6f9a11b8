"""Events of a stream that change what the events before them said are noticed, in any format."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from radix_cache.capture.streamed import (
    CHANGES,
    EACH_CHANGE,
    FORMATS,
    OF_LOGPROBS,
    Recorded,
    event,
    events,
    is_doubted,
    written,
)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_stream_without_changes_is_exact(name: str, together: int) -> None:
    told = events(name)
    for end in range(1, len(told) + 1):
        recorded = Recorded().send(*written(told[:end], name), together=together)
        assert not is_doubted(recorded)
        assert recorded.answers == [told[end - 1]]


@pytest.mark.parametrize(("name", "change"), EACH_CHANGE)
def test_change_in_any_event_is_noticed(name: str, change: str) -> None:
    for place in range(2, 7):
        told = events(name)
        (CHANGES | OF_LOGPROBS)[change](told[place])
        assert is_doubted(Recorded().send(*written(told, name))), place


@pytest.mark.parametrize("place", range(2, 7))
def test_changed_top_logprob_is_noticed(place: int) -> None:
    told = events("top logprobs")
    told[place]["meta_info"]["output_top_logprobs"][1][1][0] = -9.75
    assert is_doubted(Recorded().send(*written(told)))


@pytest.mark.parametrize("versions", ["1121", "11221", "112312", "1211"])
@pytest.mark.parametrize("incremental", [False, True])
def test_older_version_that_returns_is_noticed(versions: str, incremental: bool) -> None:
    told = [
        event([1] * end, told=end - 1 if incremental else 0, weight_version=version)
        for end, version in enumerate(versions, 1)
    ]
    assert is_doubted(Recorded().send(*written(told)))


@pytest.mark.parametrize("versions", ["1111", "1112", "1223", "1233"])
@pytest.mark.parametrize("incremental", [False, True])
def test_new_versions_are_no_contradiction(versions: str, incremental: bool) -> None:
    """Without spans it is unknown which tokens have which version."""
    told = [
        event([1] * end, told=end - 1 if incremental else 0, weight_version=version)
        for end, version in enumerate(versions, 1)
    ]
    recorded = Recorded().send(*written(told))
    assert not is_doubted(recorded)
    assert recorded.answers[-1]["meta_info"].get("weight_version") == ("1" if versions == "1111" else None)


@pytest.mark.parametrize(
    "change",
    [
        lambda spans: spans[1].update(version="3"),
        lambda spans: spans[0].update(version="2"),
        lambda spans: (spans[0].update(end=2), spans[1].update(start=2)),
        lambda spans: (spans[0].update(end=4), spans[1].update(start=4)),
        lambda spans: spans[1].update(start=2),
        lambda spans: spans[1].update(end=2),
        lambda spans: spans[1].update(end="5"),
        lambda spans: spans[0].pop("version"),
        lambda spans: spans.pop(),
        lambda spans: spans.clear(),
    ],
)
@pytest.mark.parametrize("place", [4, 5, 6])
def test_changed_spans_are_noticed(place: int, change: Callable[[list[dict[str, Any]]], object]) -> None:
    told = events("spans")
    change(told[place]["meta_info"]["weight_versions"])
    assert is_doubted(Recorded().send(*written(told)))


def test_version_that_returns_in_spans_is_no_contradiction() -> None:
    told = events("spans")
    for one in told[6:]:
        end = one["meta_info"]["completion_tokens"]
        one["meta_info"]["weight_versions"][1]["end"] = 6
        one["meta_info"]["weight_versions"].append({"version": "1", "start": 6, "end": end})
        one["meta_info"]["weight_version"] = "1"
    assert not is_doubted(Recorded().send(*written(told)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [None, 5, 6])
@pytest.mark.parametrize("logprobs", [None, [-0.5, 5, None]])
def test_second_event_that_is_shorter_is_noticed(size: int, count: int | None, logprobs: Any) -> None:
    """The mode of the stream is not known yet, and all tokens are the same."""

    def told(ids: int, **facts: Any) -> dict[str, Any]:
        entries = [logprobs] * ids if logprobs else None
        return event([5] * ids, output_token_logprobs=entries, output_top_logprobs=None, **facts)

    second = told(size, completion_tokens=count or size)
    assert is_doubted(Recorded().send(*written([told(5), second, told(5 + size), told(6 + size)])))


@pytest.mark.parametrize(
    ("member", "braces"),
    [
        ('"text":"X"', 1),
        ('"output_ids":[1]', 1),
        (r'"output_id\u0073":[1]', 1),
        ('"id":"another"', 2),
        ('"output_token_logprobs":[[-7.0,1,"X"]]', 2),
    ],
)
def test_second_value_of_a_key_is_noticed(member: str, braces: int) -> None:
    """Parsers take the last one of two equal keys. The stream is cancelled after the event."""
    for place in range(2, 7):
        data = written(events()[: place + 1])
        data[place] = data[place][:-braces] + f",{member}".encode() + b"}" * braces
        assert is_doubted(Recorded().send(*data))


@pytest.mark.parametrize("cut", [b"}", b"]", b",", b'"', b"\xa7", b'"output_ids":'])
def test_event_that_is_no_json_is_noticed(cut: bytes) -> None:
    for place in range(3, 7):
        data = written(events())
        before, _, rest = data[place].rpartition(cut)
        data[place] = before + rest
        assert is_doubted(Recorded().send(*data))


@pytest.mark.parametrize("end", [b"\\", b"\\u00", b"\xc3"])
def test_text_that_ends_inside_a_character_is_noticed(end: bytes) -> None:
    """The next event completes the character."""
    first, second = (
        b'{"text":"a',
        b'","output_ids":[1%b],"meta_info":{"finish_reason":null,"completion_tokens":%d}}',
    )
    whole = {b"\\": b"\\n", b"\\u00": b"\\u0009", b"\xc3": b"\xc3\xa9"}[end]
    data = [first + second % (b",1" * more, more + 1) for more in range(3)]
    data += [first + end + second % (b",1" * 3, 4), first + whole + second % (b",1" * 4, 5)]
    assert is_doubted(Recorded().send(*data))


def test_counter_that_decreases_is_noticed() -> None:
    told = events()
    told[4]["meta_info"]["completion_tokens"] = 9
    assert is_doubted(Recorded().send(*written(told)))


@pytest.mark.parametrize(
    "reason", [{"type": "stop", "matched": 87}, {"type": "length", "length": 9}, {"type": "abort"}, None]
)
def test_another_finish_reason_behind_the_end_is_noticed(reason: Any) -> None:
    told = events()
    behind = event([*told[-1]["output_ids"]], finish_reason=reason, output_top_logprobs=None)
    assert is_doubted(Recorded().send(*written([*told, behind])))
    assert not is_doubted(Recorded().send(*written([*told, told[-1]])))


@pytest.mark.parametrize("text", ["X", "", 'a"'])
@pytest.mark.parametrize("incremental", [False, True])
def test_abort_that_changes_something_is_noticed(incremental: bool, text: str) -> None:
    """An abort out of the waiting queue has all text, the last id, and all logprobs."""
    ids = [16, 1, 82, 3]
    told = [event(ids[:end], told=end - 1 if incremental else 0) for end in range(1, 5)]
    abort = event(ids, finish_reason={"type": "abort"}, prompt_tokens=None)
    abort["output_ids"] = ids[-1:]
    assert not is_doubted(Recorded().send(*written([*told, abort])))
    for change in OF_LOGPROBS:
        changed = orjson.loads(orjson.dumps(abort))
        OF_LOGPROBS[change](changed)
        is_empty = not changed["meta_info"]["output_token_logprobs"]
        assert is_doubted(Recorded().send(*written([*told, changed]))) or is_empty, change
    assert is_doubted(Recorded().send(*written([*told, abort | {"text": text}]))) == (text == "X")
    assert is_doubted(Recorded().send(*written([*told, abort | {"output_ids": [16, 2, 82, 3]}])))


def test_stream_is_compared_alike_wherever_it_is_cut() -> None:
    luck = random.Random(1)
    for change in (None, "text", "id", "logprob"):
        told = events()
        if change is not None:
            (CHANGES | OF_LOGPROBS)[change](told[4])
        data = b"".join(b"data: %s\n\n" % one for one in written(told))
        for _ in range(200):
            recorded, start = Recorded(), 0
            while start < len(data):
                end = start + luck.choice([1, 20, 400, 2000])
                recorded.stream.feed(data[start:end])
                start = end
            assert is_doubted(recorded) == (change is not None)
