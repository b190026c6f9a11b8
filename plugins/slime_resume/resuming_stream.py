"""Streams that resume when an engine aborts, so that the client sees one response."""

from __future__ import annotations

from typing import Any

import orjson

from router_core.errors import HTTPError
from router_core.reply import BodySource, Reply
from slime_resume.continued_stream import ContinuedStream
from slime_resume.contracts import StreamRecorder
from slime_resume.generation import Generation
from slime_resume.stream_end import rest_of
from slime_sglang import is_aborted, sampled_ids, whole_answer
from slime_sglang.bodies import parsed
from slime_sglang.events import EventSplitter

__all__ = ["ResumingStream"]

#: In JSON this cannot stand inside a string: there the quotes would be escaped.
_ABORT = b'"abort"'
_ENDS = (b"\n\n", b"\n\r\n")
_DONE = b"[DONE]"


class ResumingStream:
    """Passes whole events on as they are, until one says ``abort``: that one is held, and another attempt is made.

    When the tokens of the first attempt are kept, a ContinuedStream takes over. Otherwise the client must not
    have seen any, and the next attempt is passed on like the first one.
    """

    def __init__(self, generation: Generation, source: BodySource, recorder: StreamRecorder) -> None:
        self._generation = generation
        self._recorder = recorder
        self._reply = Reply(200, [], source)
        self._torn: list[bytes] = []
        self._seam = b""
        self._ready = b""
        self._abort = b""
        self._continued: ContinuedStream | None = None
        self._ended = False

    @property
    def finished(self) -> bool:
        """See BodySource."""
        return self._continued.finished if self._continued is not None else self._ended

    async def read(self) -> bytes:
        """See BodySource."""
        while not self.finished:
            if self._continued is not None:
                return await self._continued.read()
            if self._abort:
                await self._resume()
            else:
                await self._pass_on()
            if self._ready:
                ready, self._ready = self._ready, b""
                return ready
        return b""

    def close(self) -> None:
        """See BodySource."""
        self._reply.close()
        if self._continued is not None:
            self._continued.close()

    async def _pass_on(self) -> None:
        """Make ready what the next piece completes, up to an event that says abort."""
        piece, last = await self._reply.next_piece()
        if not last and not self._torn and piece.endswith(_ENDS[0]) and _ABORT not in piece:
            self._ready = piece  # nearly always
            return
        self._torn.append(piece)
        seam = self._seam + piece
        self._seam = seam[-2:]
        if last:
            whole, rest = b"".join(self._torn), b""
        elif any(end in seam for end in _ENDS):
            data = b"".join(self._torn)
            end = max(data.rfind(end) + len(end) for end in _ENDS if end in data)
            whole, rest = data[:end], data[end:]
        else:
            return
        self._torn, self._seam = [rest] if rest else [], rest[-2:]
        place = _abort_in(whole) if _ABORT in whole else -1
        self._ended = last and place < 0
        if place >= 0:
            whole, self._abort = whole[:place], whole[place:] + rest
        self._ready += whole

    async def _resume(self) -> None:
        self._abort += await rest_of(self._reply)
        try:
            whole, may_try_again = self._look_at_abort()
        except Exception as error:
            self._recorder.failed(error)
            may_try_again = False
        if self._continued is not None:
            return
        if not may_try_again or await self._generation.try_again(whole, self._attempt, at_once=False) is None:
            self._ready += _with_end(self._abort)
            self._ended = True

    def _look_at_abort(self) -> tuple[dict[str, Any], bool]:
        """All that was sampled until now, and whether it may be sampled again: the client has not seen any."""
        told = self._recorder.so_far()
        so_far = told.copy()
        so_far.take(_first_event(self._abort))
        going_on = self._generation.goes_on and bool(so_far.ids)
        self._recorder.keep(so_far.answer)
        if going_on:
            self._continued = ContinuedStream(self._generation, told, so_far, self._recorder)
        return so_far.answer, not (told.ids or told.text)

    async def _attempt(self) -> bool | None:
        """Another stream; None when it ended, or was aborted, too, before it gave anything."""
        reply = await self._generation.ask_again((), None)
        if reply is None:
            return None
        self._reply = reply
        aborted, self._abort = self._abort, b""
        self._torn, self._seam = [], b""
        try:
            while not self._ready and not self._abort and not self._ended:
                await self._pass_on()
        except HTTPError:
            self._ended = True
        if self._ready:
            self._recorder.begin_anew()
            return True
        if self._abort:
            output = _read_alone(_first_event(self._abort))
            if output is not None and sampled_ids(output):
                self._recorder.begin_anew()
                if self._generation.goes_on:
                    return True
                self._recorder.keep(output)
            self._abort += await rest_of(reply)
        else:
            self._abort, self._ended = aborted, False
        self._generation.rest(reply)
        return None


def _abort_in(data: bytes) -> int:
    """Return the offset in ``data``, whole events, of the first event that says abort; -1 when there is none."""
    place = data.find(_ABORT)
    while place >= 0:
        start = max((data.rfind(end, 0, place) + len(end) for end in _ENDS if end in data[:place]), default=0)
        try:
            if is_aborted(_first_event(data[start:])):
                return start
        except orjson.JSONDecodeError:
            pass  # no event of a generation
        place = data.find(_ABORT, place + len(_ABORT))
    return -1


def _read_alone(event: Any) -> dict[str, Any] | None:
    """``event``, the first one, as an unstreamed answer; None when it makes no sense."""
    try:
        return whole_answer(event)
    except ValueError:
        return None


def _with_end(data: bytes) -> bytes:
    """The first of the events in ``data``, whole ones, and the end that every stream has."""
    events = EventSplitter().feed(data + b"\n\n")
    if _DONE in events:
        return data
    return b"data: %s\n\ndata: %s\n\n" % (events[0], _DONE)


def _first_event(data: bytes) -> Any:
    """Return the first event of ``data``, parsed; None when there is none."""
    events = EventSplitter().feed(data + b"\n\n")
    return parsed(events[0]) if events else None
