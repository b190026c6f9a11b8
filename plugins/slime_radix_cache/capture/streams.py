"""Answers that come as server-sent events, put together from the bytes that the client gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_radix_cache.capture.repeats import RepeatedEvents
from slime_sglang import AnswerSoFar, is_abort, read_event
from slime_sglang.bodies import parsed
from slime_sglang.events import BEGIN, EventSplitter

__all__ = ["GenerationStream"]

#: Keys as SGLang writes them. Inside a JSON string their quotes would be escaped.
_FINISH = b'"finish_reason":'
_INDEX = b'"index":'
_OF_A_SEQUENCE = {"text", "output_ids"}


class GenerationStream:
    """One streamed ``/generate`` answer: takes its bytes, and makes the answers that an unstreamed request would get.

    ``record(index, answer, took_back)`` is called for each sequence when its last event has come, before the client
    gets that event. :meth:`record_all` calls it with the answer so far. ``took_back``: an event had other tokens or
    another text than an event before it. Errors are not raised; ``fail(error)`` is called with each.
    ``keeps_arrays``: see :func:`slime_sglang.bodies.parsed`.
    """

    def __init__(
        self,
        record: Callable[[int, Any, bool], None],
        fail: Callable[[Exception], None],
        *,
        keeps_arrays: bool = False,
    ) -> None:
        self._record = record
        self._keeps_arrays = keeps_arrays
        self._fail = fail
        self._events = EventSplitter()
        self._answers: dict[int, AnswerSoFar] = {}
        self._repeats: dict[int, RepeatedEvents] = {}
        #: The events of the only sequence, while it is cumulative and has not ended. The last one may not be in its
        #: answer yet.
        self._only: RepeatedEvents | None = None
        self._ended: set[int] = set()
        self._recorded: set[int] = set()
        #: The engine has sent an error event.
        self.failed = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the reply."""
        only = self._only
        if only is not None:
            end = self._events.end_of_only(chunk)
            if end and only.see_next(chunk, BEGIN, end):
                return  # nearly always
        for data in self._events.feed(chunk):
            if data != b"[DONE]":
                try:
                    self._event(data)
                except Exception as error:
                    self._fail(error)

    def record_all(self) -> None:
        """Record the received part of each sequence that has not ended."""
        self._hold()
        for index in self._answers.keys() - self._ended:
            self._try_record(index)

    def record_again(self) -> None:
        """Record again all sequences that were recorded: they are not exact any more."""
        self._hold()
        for index in list(self._recorded):
            self._try_record(index)

    def forget(self) -> None:
        """Drop the callbacks: they refer to this stream, and only the garbage collector would free such a cycle."""
        self._record = lambda index, answer, took_back: None
        self._fail = lambda error: None

    def has_begun(self, index: int) -> bool:
        """Return True if an event of sequence ``index`` has come."""
        return index in self._answers

    def so_far(self) -> AnswerSoFar:
        """Return a copy of the only sequence, as far as it has come."""
        self._hold()
        answer = self._answers.get(0)
        return answer.copy() if answer is not None else AnswerSoFar()

    def _hold(self) -> None:
        """Give the last event to the answer, if it is not there yet."""
        if self._only is not None and (event := self._only.take_held()) is not None:
            self._answers[0].hold(event)

    def _event(self, data: bytes) -> None:
        if self._only is not None:
            if self._only.see_next(data, 0, len(data)):
                return
            self._hold()
        try:
            self._take(data)
        finally:
            self._only = self._repeats.get(0) if self._is_cumulative() else None

    def _is_cumulative(self) -> bool:
        """Return True while the only sequence is cumulative and has not ended."""
        only = self._answers.get(0)
        return only is not None and only.cumulative and 0 not in self._ended

    def _take(self, data: bytes) -> None:
        if self._is_cumulative() and _INDEX not in data and not _is_last(data):
            self._answers[0].hold(data)
            self._compare(0, data)
            return
        event = parsed(data, keeps_arrays=self._keeps_arrays)
        if isinstance(event, dict) and "meta_info" not in event and not event.keys() & _OF_A_SEQUENCE:
            self.failed = True  # an error event: the tokens before it stay valid
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
        if not (answer.cumulative or answer.incremental) and answer.ids:  # the next event may repeat it
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
    """Raise ValueError if ``event``, which came after the end of ``answer``, has more or other tokens or text."""
    longer = answer.copy()
    longer.take(event)
    if (longer.ids, longer.text) != (answer.ids, answer.text):
        raise ValueError("a sequence continues after its finish reason")


def _is_last(data: bytes) -> bool:
    """Return True unless the finish reason of the event is null."""
    place = data.rfind(_FINISH)
    return place < 0 or not data[place + len(_FINISH) :].lstrip().startswith(b"null")
