"""Answers that come as server-sent events, put together from the bytes that the client gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_radix_cache.capture.repeats import RepeatedEvents
from slime_sglang import PER_TOKEN, AnswerSoFar, read_event
from slime_sglang.answers import TOKEN_ARRAYS
from slime_sglang.bodies import is_small, parsed
from slime_sglang.event_readers import Growth, Reading
from slime_sglang.events import EventSplitter, sequence_of

__all__ = ["GenerationStream"]

#: The bytes before and behind the data of an event of one line.
_BEGIN, _END = b"data: ", b"\n\n"
_OF_A_SEQUENCE = {"text", "output_ids"}
#: Values in ``meta_info`` that no event after a sequence's end may change. ``AnswerSoFar`` compares further values.
_AT_THE_END = (
    "completion_tokens",
    "weight_version",
    "weight_versions",
    "output_token_logprobs_length",
    "output_token_sampling_mask_length",
    *TOKEN_ARRAYS,
)


class GenerationStream:
    """One streamed ``/generate`` answer: takes its bytes, and makes the answers that an unstreamed request would get.

    ``record(index, answer, took_back)`` is called for each sequence when its last event has come, before the client
    gets that event. :meth:`record_all` calls it with the answer so far. ``took_back``: an event contradicted itself, or
    changed a statement of an event before it. Errors are not raised; ``fail(error)`` is called with each.
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
        #: The comparison of the events of each sequence that has cumulative events and has not ended. The sequence's
        #: answer in ``_answers`` may lack the last event.
        self._repeats: dict[int, RepeatedEvents] = {}
        #: One of ``_repeats``, if its events have no number: then the reply has only one sequence.
        self._only: RepeatedEvents | None = None
        #: ``meta_info`` of the event that ended a sequence, for each sequence that has ended.
        self._ended: dict[int, dict[str, Any]] = {}
        self._recorded: set[int] = set()
        #: ``_piece``: the last argument of :meth:`growth`. ``_growth``: its result. ``_is_ahead``: :meth:`feed` has not
        #: taken the piece yet.
        self._piece = b""
        self._growth: Growth | None = None
        self._is_ahead = False
        #: The data and the reading of each event that ended in the last piece. Not used while ``_growth`` is not None.
        self._read: list[tuple[bytes, Reading]] = []
        #: The engine has sent an error event.
        self.failed = False

    def growth(self, piece: bytes) -> Growth | None:
        """See EventReader. The event in ``piece`` is compared now, and taken by :meth:`feed`."""
        if self._is_ahead and piece is self._piece:
            return self._growth
        self._piece, self._is_ahead, self._growth = piece, True, None
        repeats, index = self._only, 0
        if repeats is None:
            index = sequence_of(piece) or 0
            repeats = self._repeats.get(index)
        if (
            repeats is not None
            and piece.startswith(_BEGIN)
            and piece.endswith(_END)
            and not self._events.is_torn
            and repeats.see_next(piece, len(_BEGIN), len(piece) - len(_END))
        ):
            self._growth = index, repeats.new_text
        return self._growth

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the reply."""
        growth = self.growth(chunk)
        self._is_ahead = False
        if growth is not None:
            self._repeats[growth[0]].take_seen()
            return  # nearly always
        self._read.clear()
        for data in self._events.feed(chunk):
            reading: Reading = None
            if data != b"[DONE]":
                try:
                    reading = self._event(data)
                except Exception as error:
                    for repeats in self._repeats.values():
                        repeats.stop()  # others may have taken this event: no Growth may be based on an earlier one
                    self._fail(error)
            self._read.append((data, reading))

    def reading(self, number: int, data: bytes) -> Reading:
        """See EventReader."""
        if self._growth is not None:
            size, begin = len(data), len(_BEGIN)
            is_same = self._piece.startswith(data, begin) and len(self._piece) == begin + size + len(_END)
            return self._growth if is_same else None
        known, reading = self._read[number] if number < len(self._read) else (b"", None)
        return reading if known == data else None

    def record_all(self) -> None:
        """Record the received part of each sequence that has not ended."""
        for index in self._answers.keys() - self._ended.keys():
            self._try_record(index)

    def record_again(self) -> None:
        """Record again all sequences that were recorded: they are not exact any more."""
        for index in list(self._recorded):
            self._try_record(index)

    def forget(self) -> None:
        """Drop the callbacks: they refer to this stream, and only the garbage collector would free such a cycle."""
        self._record = lambda index, answer, took_back: None
        self._fail = lambda error: None
        self._read.clear()

    def has_begun(self, index: int) -> bool:
        """Return True if an event of sequence ``index`` has come."""
        return index in self._answers

    def so_far(self) -> AnswerSoFar:
        """Return a copy of the answer so far. Only for a stream of one sequence."""
        self._hold(0)
        answer = self._answers.get(0)
        return answer.copy() if answer is not None else AnswerSoFar()

    def _hold(self, index: int) -> None:
        """Give the last event of sequence ``index`` to the sequence's answer, if the answer lacks this event."""
        repeats = self._repeats.get(index)
        if repeats is not None and (event := repeats.take_held()) is not None:
            self._answers[index].hold(event)

    def _event(self, data: bytes) -> Reading:
        number = sequence_of(data) or 0
        repeats = self._repeats.get(number)
        if repeats is not None and repeats.see_next(data, 0, len(data)):
            repeats.take_seen()
            return number, repeats.new_text
        event = parsed(data, keeps_arrays=self._keeps_arrays)
        if isinstance(event, dict) and "meta_info" not in event and not event.keys() & _OF_A_SEQUENCE:
            self.failed = True  # an error event: the tokens before it stay valid
        else:
            self._take(data, read_event(event))
        return event if is_small(data) else None  # in a large event, arrays may be cut out

    def _take(self, data: bytes, event: dict[str, Any]) -> None:
        index = event.get("index", 0)
        if index in self._ended:
            _check_is_old(event, self._answers[index], self._ended[index])
            return
        self._hold(index)
        repeats = self._repeats.pop(index, None)
        self._only = None
        answer = self._answers.get(index) or AnswerSoFar()
        is_last = event["meta_info"].get("finish_reason") is not None
        repeats_all = is_last and repeats is not None and repeats.repeats_all(data, event["meta_info"])
        answer.take(event, repeats=repeats_all)
        self._answers[index] = answer
        if is_last:
            self._ended[index] = event["meta_info"]
            self._try_record(index)
        elif answer.cumulative:
            repeats = repeats or RepeatedEvents()
            repeats.expect(data, event)
            self._repeats[index] = repeats
            self._only = repeats if "index" not in event else None

    def _try_record(self, index: int) -> None:
        try:
            self._hold(index)
            answer = self._answers[index]
            self._record(index, answer.answer, answer.rewritten)
            self._recorded.add(index)
        except Exception as error:
            self._fail(error)


def _check_is_old(event: dict[str, Any], answer: AnswerSoFar, last: dict[str, Any]) -> None:
    """Raise ValueError if ``event``, which came after the end of ``answer``, adds to ``answer`` or changes a fact.

    ``last``: ``meta_info`` of the event at the end. A fact that ``event`` lacks is no change.
    """
    longer = answer.copy()
    longer.take(event)
    known, told = answer.meta, longer.meta
    is_same = (
        longer.ids == answer.ids
        and longer.text == answer.text
        and longer.rewritten == answer.rewritten
        and all(told.get(name) == known.get(name) for name in PER_TOKEN if event["meta_info"].get(name))
        and all(event["meta_info"].get(name) in (None, last.get(name)) for name in _AT_THE_END)
    )
    if not (is_same and longer.finish_reason == answer.finish_reason):
        raise ValueError("a sequence continues after its finish reason")
