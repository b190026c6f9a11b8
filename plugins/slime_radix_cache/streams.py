"""Answers that come as server-sent events: put together from the bytes that the client sees.

SGLang's events are cumulative (each has the whole text and all ids so far) or, with
``--incremental-streaming-output``, deltas with cumulative counters. Which one it is shows in the counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router_core.events import EventSplitter
from slime_radix_cache.joining import read_event
from slime_radix_cache.replies import parsed

__all__ = ["GenerationStream", "put_together"]

#: In JSON this cannot stand inside a string: there the quotes would be escaped.
_FINISH = b'"finish_reason":'
_INDEX = b'"index":'


class GenerationStream:
    """One streamed ``/generate``: its bytes in, answers as of an unstreamed one out.

    ``record(index, output)`` is called for each sequence when its last event has come, so before the client
    sees that event; and with what there is by :meth:`record_all`. ``fail(error)`` is called when something goes
    wrong; nothing is raised.
    """

    def __init__(self, record: Callable[[int, Any], None], fail: Callable[[Exception], None]) -> None:
        self._record = record
        self._fail = fail
        self._events = EventSplitter()
        self._sequences: dict[int, _Sequence] = {}

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the reply."""
        try:
            for data in self._events.feed(chunk):
                if data != b"[DONE]":
                    self._event(data)
        except Exception as error:
            self._fail(error)

    def record_all(self) -> None:
        """Record what has come of the sequences that have not ended."""
        for index, sequence in self._sequences.items():
            if not sequence.ended:
                self._try_record(index, sequence)

    def forget(self) -> None:
        """Let go of who listens, who has this: a circle would wait for the garbage collector."""
        self._record = lambda index, output: None
        self._fail = lambda error: None

    def so_far(self) -> dict[str, Any] | None:
        """All that was told of the only sequence, as an unstreamed answer has it; None before its first event."""
        sequence = self._sequences.get(0)
        return sequence.output() if sequence is not None else None

    def _event(self, data: bytes) -> None:
        only = self._sequences.get(0)
        if only is not None and only.cumulative and _INDEX not in data and not _is_last(data):
            only.pending = data  # the next event says all this again, so parsing each would be quadratic
            return
        event = parsed(data)
        if isinstance(event, dict) and "meta_info" not in event:
            return  # an error after the start: what was sampled until then stays
        event = read_event(event)
        index = event.get("index", 0)
        sequence = self._sequences.setdefault(index, _Sequence())
        if sequence.ended:
            return
        sequence.add(event)
        if event["meta_info"].get("finish_reason") is not None:
            sequence.ended = True
            self._try_record(index, sequence)

    def _try_record(self, index: int, sequence: _Sequence) -> None:
        try:
            self._record(index, sequence.output())
        except Exception as error:
            self._fail(error)


class _Sequence:
    """What is known of one sampled sequence."""

    def __init__(self) -> None:
        self.cumulative = False
        self.ended = False
        self.pending: bytes | None = None
        self._output: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Take in an event: instead of what there is when it says all of it again, else behind it."""
        before, meta = self._output, event["meta_info"]
        if before is not None and _sampled(event) == meta.get("completion_tokens"):
            self.cumulative = _sampled(before) > 0
        elif before is not None:
            event = _appended(self._latest(before), event)
        self.pending = None
        self._output = event

    def _latest(self, known: dict[str, Any]) -> dict[str, Any]:
        if self.pending is None:
            return known
        latest: dict[str, Any] = parsed(self.pending)
        return latest

    def output(self) -> dict[str, Any]:
        """All of it, as an unstreamed answer has it."""
        assert self._output is not None  # a sequence is made for its first event
        return self._latest(self._output)


def put_together(told: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """All that a stream says with ``event``, as an unstreamed answer has it, when it has ``told`` so much before.

    Raises ValueError when tokens are missing.
    """
    return event if _sampled(event) == event["meta_info"].get("completion_tokens") else _appended(told, event)


def _appended(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """``event``, a delta, behind what was sampled before."""
    whole = dict(event)
    for key in ("text", "output_ids"):
        if key in before:
            whole[key] = before[key] + event.get(key, before[key][:0])
    meta = whole["meta_info"] = dict(event["meta_info"])
    count = meta.get("completion_tokens")
    earlier = before["meta_info"].get("output_token_logprobs")
    logprobs = meta.get("output_token_logprobs", [])
    if earlier and len(logprobs) != count:  # some servers send them cumulative beside deltas
        meta["output_token_logprobs"] = earlier + logprobs
    if count is not None and _sampled(whole) != count:
        raise ValueError(f"a stream with {_sampled(whole)} tokens of {count}")
    return whole


def _sampled(event: dict[str, Any]) -> int:
    ids = event.get("output_ids")
    return len(ids if ids is not None else event["meta_info"].get("output_token_logprobs") or ())


def _is_last(data: bytes) -> bool:
    """True unless the event says that generating goes on."""
    place = data.rfind(_FINISH)
    return place < 0 or not data[place + len(_FINISH) :].lstrip().startswith(b"null")
