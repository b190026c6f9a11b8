"""Streams of several sequences, whose events come in turn: each event is compared with those of its own sequence."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest

from radix_cache.capture.streamed import (
    CHANGES,
    EACH_CHANGE,
    FORMATS,
    OF_LOGPROBS,
    Recorded,
    events,
    is_doubted,
    written,
)
from router_core.cli import is_compiled
from slime_radix_cache.capture import streams
from slime_radix_cache.capture.streams import GenerationStream
from slime_sglang.bodies import parsed

Event = dict[str, Any]

SEQUENCES = 3


class SeveralRecorded:
    """A stream, and what was recorded of each of its sequences."""

    def __init__(self) -> None:
        self.of = [Recorded() for _ in range(SEQUENCES)]
        self.errors: list[Exception] = []
        self.stream = GenerationStream(self._record, self.errors.append)

    def _record(self, index: int, answer: Any, took_back: bool) -> None:
        self.of[index].answers.append(answer)
        self.of[index].took_back |= took_back

    def doubted(self) -> list[int]:
        """Return the sequences whose records are not exact."""
        return [index for index, one in enumerate(self.of) if is_doubted(one)]


def numbered(name: str) -> list[list[Event]]:
    """Return the events of each sequence in the format ``name``, with its number at the end of the JSON."""
    return [
        [{key: one[key] for key in one if key != "index"} | {"index": index} for one in events(name)]
        for index in range(SEQUENCES)
    ]


def sent(told: list[list[Event]], name: str, together: int = 1) -> SeveralRecorded:
    """Send the events of all sequences in turn, so many ``together``, and then the end of a cancelled stream."""
    recorded = SeveralRecorded()
    data = written(chain.from_iterable(zip(*told, strict=True)), name)
    for start in range(0, len(data), together):
        recorded.stream.feed(b"".join(b"data: %s\n\n" % one for one in data[start : start + together]))
    recorded.stream.record_all()
    assert recorded.errors == []
    return recorded


@pytest.mark.parametrize("together", [1, 2, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_each_sequence_is_recorded_as_it_ends(name: str, together: int) -> None:
    for end in range(1, 9):
        told = [one[:end] for one in numbered(name)]
        recorded = sent(told, name, together)
        assert recorded.doubted() == []
        assert [one.answers for one in recorded.of] == [[each[-1]] for each in told]


@pytest.mark.parametrize(("name", "change"), EACH_CHANGE)
def test_change_in_any_event_of_a_sequence_is_noticed(name: str, change: str) -> None:
    for place in range(2, 7):
        told = numbered(name)
        (CHANGES | OF_LOGPROBS)[change](told[1][place])
        assert sent(told, name).doubted() == [1], place


@pytest.mark.parametrize("place", range(2, 7))
def test_number_of_another_sequence_is_noticed(place: int) -> None:
    """Both sequences have the same text and tokens, but one misses an event and the other has one twice."""
    told = numbered("sglang")
    for one in told[2]:
        one["text"] = f"another {one['text']}"
    told[1][place]["index"] = 2
    assert sent(told, "sglang").doubted() == [2]


def test_sequences_are_recorded_alike_wherever_the_bytes_are_cut() -> None:
    luck = random.Random(1)
    told = numbered("sglang")
    data = b"".join(b"data: %s\n\n" % one for one in written(chain.from_iterable(zip(*told, strict=True))))
    for _ in range(100):
        recorded, start = SeveralRecorded(), 0
        while start < len(data):
            end = start + luck.choice([1, 20, 400, 2000])
            recorded.stream.feed(data[start:end])
            start = end
        assert (recorded.doubted(), recorded.errors) == ([], [])
        assert [one.answers for one in recorded.of] == [[each[-1]] for each in told]


def test_number_before_the_text_is_read_too() -> None:
    told = [[{"index": one["index"]} | one for one in each] for each in numbered("sglang")]
    recorded = sent(told, "sglang")
    assert recorded.doubted() == []
    assert [one.answers for one in recorded.of] == [[each[-1]] for each in told]


@pytest.mark.skipif(is_compiled(), reason="a compiled function cannot be replaced")
@pytest.mark.parametrize("together", [1, 5])
def test_cumulative_sequences_are_recorded_from_their_last_events(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[bytes] = []

    def counted(data: bytes, **more: Any) -> Any:
        whole.append(data)
        return parsed(data, **more)

    monkeypatch.setattr(streams, "parsed", counted)
    recorded = sent(numbered("sglang"), "sglang", together)
    assert recorded.doubted() == []
    assert len(whole) == 3 * SEQUENCES  # the first two events tell that events are cumulative


def test_sequence_that_goes_on_behind_its_end_is_an_error() -> None:
    told = numbered("sglang")
    recorded = SeveralRecorded()
    behind = told[1][-1] | {"text": told[1][-1]["text"] + "8"}
    for one in written([*told[0][:4], *told[1], behind, *told[0][4:]]):
        recorded.stream.feed(b"data: %s\n\n" % one)
    assert [str(error) for error in recorded.errors] == ["a sequence continues after its finish reason"]
    assert recorded.of[0].answers == [told[0][-1]]
