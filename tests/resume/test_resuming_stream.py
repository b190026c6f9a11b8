"""A stream without an abort passes as it is, however it is torn; one with an abort stops before it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.reply import BodySource
from slime_radix_cache.capture.recorder import StreamRecorder
from slime_resume.generation import Generation
from slime_resume.resuming_stream import ResumingStream

pytestmark = pytest.mark.anyio


class Torn:
    """A source that gives its pieces one by one."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.closed = False

    @property
    def finished(self) -> bool:
        return not self.pieces

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    def close(self) -> None:
        self.closed = True


def event(text: str, reason: dict[str, Any] | None = None) -> bytes:
    return b"data: %s" % orjson.dumps({"text": text, "meta_info": {"finish_reason": reason, "id": "abort"}})


def torn(data: bytes, cuts: list[int]) -> Torn:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return Torn([data[start:end] for start, end in pairwise(places)])


def passing(source: BodySource) -> ResumingStream:
    """Nobody is asked while nothing is aborted."""
    return ResumingStream(cast(Generation, None), source, cast(StreamRecorder, None))


EVENTS = st.lists(
    st.sampled_from(
        [
            event("plain"),
            event('says "abort"'),
            event("abort", {"type": "stop", "matched": "abort"}),
            event("wrong", {"type": "abort", "status_code": 400}),
            b'data: {"error": "abort"}',
            b': a comment "abort"',
            b"data: [DONE]",
        ]
    ),
    min_size=1,
)


@given(EVENTS, st.sampled_from([b"\n\n", b"\r\n\r\n"]), st.lists(st.integers(0, 5000)), st.booleans())
async def test_a_stream_without_an_abort_passes_as_it_is(
    events: list[bytes], end: bytes, cuts: list[int], ends_well: bool
) -> None:
    data = end.join(events) + (end if ends_well else b"")
    source = torn(data, cuts)
    stream, got = passing(source), b""
    while not stream.finished:
        piece = await stream.read()
        got += piece
        assert not piece or stream.finished or piece.endswith(b"\n"), "only whole events"
    assert got == data
    stream.close()
    assert source.closed


@given(st.lists(st.integers(0, 5000)), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
async def test_nothing_of_an_abort_is_told_before_it_is_known_what_follows(
    cuts: list[int], end: bytes
) -> None:
    before = event("some") + end + event('some "abort"') + end
    data = before + event("some more", {"type": "abort"}) + end + b"data: [DONE]" + end
    stream, got = passing(torn(data, cuts)), b""
    while got != before:
        assert not stream.finished
        got += await stream.read()
        assert before.startswith(got)
