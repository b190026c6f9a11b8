"""Answers that come as server-sent events: put together from the bytes that the client sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_radix_cache.capture.repeats import RepeatedEvents
from slime_sglang import AnswerSoFar, is_abort, read_event
from slime_sglang.bodies import parsed
from slime_sglang.events import EventSplitter

__all__ = ["GenerationStream"]

#: In JSON this cannot stand inside a string: there the quotes would be escaped.
_FINISH = b'"finish_reason":'
_INDEX = b'"index":'
_OF_A_SEQUENCE = {"text", "output_ids"}


class GenerationStream:
    """One streamed ``/generate``: its bytes in, answers as of an unstreamed one out.

    ``record(index, answer, took_back)`` is called for each sequence when its last event has come, before the client
    sees that event. :meth:`record_all` calls it with what there is. ``took_back``: an event told other tokens, or
    another text, than one before. ``fail(error)`` is called when something goes wrong; nothing is raised.
    """

    def __init__(self, record: Callable[[int, Any, bool], None], fail: Callable[[Exception], None]) -> None:
        self._record = record
        self._fail = fail
        self._events = EventSplitter()
        self._answers: dict[int, AnswerSoFar] = {}
        self._repeats: dict[int, RepeatedEvents] = {}
        self._ended: set[int] = set()
        self._recorded: set[int] = set()
        #: The engine has said that it failed.
        self.failed = False

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the reply."""
        for data in self._events.feed(chunk):
            if data != b"[DONE]":
                try:
                    self._event(data)
                except Exception as error:
                    self._fail(error)

    def record_all(self) -> None:
        """Record what has come of the sequences that have not ended."""
        for index in self._answers.keys() - self._ended:
            self._try_record(index)

    def record_again(self) -> None:
        """Record once more what was recorded: there is something to be said against it."""
        for index in list(self._recorded):
            self._try_record(index)

    def forget(self) -> None:
        """Let go of the listeners: they refer to this stream, and a cycle would wait for the garbage collector."""
        self._record = lambda index, answer, took_back: None
        self._fail = lambda error: None

    def has_begun(self, index: int) -> bool:
        """True when an event of sequence ``index`` has come."""
        return index in self._answers

    def so_far(self) -> AnswerSoFar:
        """All that was told of the only sequence. A copy."""
        answer = self._answers.get(0)
        return answer.copy() if answer is not None else AnswerSoFar()

    def _event(self, data: bytes) -> None:
        only = self._answers.get(0)
        if only is not None and only.cumulative and _INDEX not in data and not _is_last(data):
            only.hold(data)
            self._compare(0, data)
            return
        event = parsed(data)
        if isinstance(event, dict) and "meta_info" not in event and not event.keys() & _OF_A_SEQUENCE:
            self.failed = True  # an error after the start: what was sampled until then stays
            return
        event = read_event(event)
        index = event.get("index", 0)
        if index in self._ended:
            _check_is_old(event, self._answers[index])
            return
        answer = self._answers.get(index) or AnswerSoFar()
        answer.take(event)
        self._answers[index] = answer
        is_last = event["meta_info"].get("finish_reason") is not None
        if not is_abort(event["meta_info"]):  # an abort repeats only part of what came before
            self._compare(index, data, is_last=is_last)
        if is_last:
            self._ended.add(index)
            self._try_record(index)

    def _compare(self, index: int, data: bytes, *, is_last: bool = False) -> None:
        answer = self._answers[index]
        if not (answer.cumulative or answer.incremental) and answer.ids:  # the next one may repeat this one
            self._repeats[index] = RepeatedEvents()
        if not answer.incremental:
            self._repeats.setdefault(index, RepeatedEvents()).see(data, is_last=is_last)

    def _try_record(self, index: int) -> None:
        try:
            answer, repeats = self._answers[index], self._repeats.get(index)
            took_back = answer.rewritten or (repeats is not None and repeats.took_back)
            self._record(index, answer.answer, took_back)
            self._recorded.add(index)
        except Exception as error:
            self._fail(error)


def _check_is_old(event: dict[str, Any], answer: AnswerSoFar) -> None:
    """Raise ValueError when ``event``, behind the end of ``answer``, tells a client more or other tokens or text."""
    longer = answer.copy()
    longer.take(event)
    if (longer.ids, longer.text) != (answer.ids, answer.text):
        raise ValueError("a sequence goes on behind its end")


def _is_last(data: bytes) -> bool:
    """True unless the event says that generating goes on."""
    place = data.rfind(_FINISH)
    return place < 0 or not data[place + len(_FINISH) :].lstrip().startswith(b"null")
