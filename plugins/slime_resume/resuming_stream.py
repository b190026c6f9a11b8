"""Streams that resume when an engine aborts, so that the client sees one response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import orjson

from router_core.errors import HTTPError, WorkerBroke
from router_core.reply import BodySource, Reply
from slime_resume.contracts import StreamRecorder
from slime_resume.generation import Generation
from slime_resume.response_merger import MergedResponse
from slime_sglang import is_aborted, read_event, sampled_ids, whole_answer
from slime_sglang.bodies import parsed
from slime_sglang.events import EventCutter, events_in, last_end
from slime_sglang.token_arrays import dumped

__all__ = ["ResumingStream"]

#: Bytes of an event's JSON. They are never inside a longer JSON string, where the quotes would be escaped.
_ABORT, _FINISH, _GOES_ON = b'"abort"', b'"finish_reason":', b'"finish_reason":null'
_DONE = b"[DONE]"
_EVENT = b"data: %s\n\n"
#: Limits for reading the end of a stream after its last event.
_END_S, _END_BYTES = 1.0, 1 << 16


class ResumingStream:
    """Passes whole events unchanged until one is an abort. The stream holds back the abort, and makes another attempt.

    If the next attempts continue from tokens, their events are merged, in the mode of the events that the client got:
    cumulative or incremental. If the client has tokens and the mode is not known yet, merged events might repeat these
    tokens, so they wait until the mode is known or the response ends. If attempts do not continue from tokens, another
    attempt is made only while the client has no token; its events pass unchanged, too.
    """

    def __init__(self, generation: Generation, source: BodySource, recorder: StreamRecorder) -> None:
        self._generation = generation
        self._recorder = recorder
        self._merged: MergedResponse | None = None
        #: The numbers of tokens and of characters of the merged response that the client has got.
        self._tokens = self._characters = 0
        #: The bytes of an abort, and of the rest of its stream.
        self._held = b""
        self._listen_to(Reply(200, [], source))

    def _listen_to(self, reply: Reply) -> None:
        self._reply, self._cutter = reply, EventCutter()
        self._aborted: dict[str, Any] | None = None
        self._ready = b""
        self.finished = False

    async def read(self) -> bytes:
        """See BodySource."""
        while not self._ready and not self.finished:
            if self._aborted is None:
                await self._take_piece()
            else:
                await self._resume(self._aborted)
        ready, self._ready = self._ready, b""
        return ready

    async def pump(self, take: Callable[[bytes], bool]) -> None:
        """See :meth:`Reply.pump`. Gives ``take`` pieces of whole events up to an abort, while nothing is merged."""
        if self._ready or self.finished or self._aborted is not None or self._merged is not None:
            return
        cutter, growth = self._cutter, self._recorder.growth

        def pass_on(piece: bytes, _: object) -> bool:
            if cutter.is_torn:
                return False
            # If ``growth`` returns something, the piece is no abort.
            if growth(piece) is None and (not piece.endswith(b"\n\n") or _may_abort(piece)):
                return False
            return take(piece)

        await self._reply.pump(pass_on)

    def close(self) -> None:
        """See BodySource."""
        self._reply.close()

    async def _take_piece(self) -> None:
        piece, last = await self._reply.next_piece()
        whole = self._cutter.feed(piece)
        if last:
            whole += self._cutter.rest()
        if self._merged is not None:
            self._merge(self._merged, whole, last)
        elif _may_abort(whole):
            self._hold_abort(whole, last)
        else:
            self._ready, self.finished = whole, last  # the usual case

    def _hold_abort(self, whole: bytes, last: bool) -> None:
        """Make ready the events in ``whole`` before an abort, and hold back the rest."""
        place, self._aborted = _find_abort(whole)
        self._ready = whole[:place]
        if self._aborted is not None:
            self._held = whole[place:] + self._cutter.rest()
        else:
            self.finished = last

    def _merge(self, merged: MergedResponse, whole: bytes, last: bool) -> None:
        """Make ready what is new in ``whole``, up to an abort."""
        for data in events_in(whole):
            event = _event_in(data) if data != _DONE and not merged.ended else None
            if event is None:
                self._ready += _EVENT % data
                continue
            news = _taken(merged, event)
            if is_aborted(event) and not merged.ended:
                if merged.ids:
                    self._recorder.keep(merged.answer())
                self._aborted = event
                return
            if merged.ended or (news and self._may_tell(merged)):
                self._tell(merged)
            if merged.stopped or is_aborted(event):
                self._end()  # the engine does not know that the response has ended
                return
        if last and self._tokens < len(merged.ids):
            self._tell(merged)
        self.finished = last

    def _may_tell(self, merged: MergedResponse) -> bool:
        """Return False while an event might repeat tokens, or take back text.

        For example, the text that the client has may end with U+FFFD, which stands for the first bytes of a character.
        The merged text leaves it out, and is shorter than the client's text, until the next attempt brings the rest.
        """
        is_mode_known = merged.incremental is not None or not self._tokens
        return is_mode_known and merged.text_length >= self._characters

    def _tell(self, merged: MergedResponse) -> None:
        known = (self._tokens, self._characters) if self._tokens and merged.incremental else (0, 0)
        self._ready += _EVENT % dumped(merged.event(*known))
        self._tokens, self._characters = len(merged.ids), merged.text_length

    def _end(self) -> None:
        self.close()
        self._ready += _EVENT % _DONE
        self.finished = True

    async def _resume(self, aborted: dict[str, Any]) -> None:
        """Make further attempts; if no attempt helps, end with the abort."""
        self._held += await _rest_of(self._reply)
        may_resume = True
        if self._merged is None:
            try:
                aborted, may_resume = self._look_at_abort(aborted)
            except Exception as error:
                self._recorder.failed(error)
                may_resume = False
        merged = self._merged
        is_over = merged.ended if merged is not None else not may_resume
        if not is_over and await self._generation.resume(aborted, merged, self._attempt):
            return
        self._ready, self.finished = b"", True
        if merged is not None:
            self._tell(merged)
            self._end()
        else:
            self._ready = _with_end(self._held)

    def _look_at_abort(self, aborted: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return all that was sampled so far, and True if another attempt may be made."""
        told = self._recorder.so_far()
        so_far = told.copy()
        so_far.take(aborted)
        if so_far.rewritten:
            self._recorder.failed(ValueError("the abort contradicts the events before it"))
        goes_on = self._generation.goes_on and bool(so_far.ids)
        self._recorder.keep(so_far.answer)
        if goes_on:
            merged = self._generation.merge(so_far.answer)
            merged.see_mode(so_far)
            self._recorder.doubt = merged.doubt
            self._tokens, self._characters = len(told.ids), len(told.text)
            self._merged = merged
        return so_far.answer, goes_on or not (told.ids or told.text)

    async def _attempt(self, reply: Reply) -> bool:
        """Read ``reply`` until there is something to send, or it has ended. Return True if the response has grown."""
        self._listen_to(reply)
        while not self._ready and self._aborted is None and not self.finished:
            await self._take_piece()
        merged = self._merged
        if merged.has_grown if merged is not None else self._begins_response():
            return True
        if self._aborted is not None:
            self._held += await _rest_of(reply)
        return False

    def _begins_response(self) -> bool:
        """Return True if this attempt begins the response.

        Either it has something to send, or it was aborted after its first tokens, and another attempt may continue it.
        """
        if not self._ready:
            output = _read_alone(self._aborted) if self._aborted is not None else None
            if output is None or not sampled_ids(output):
                return False  # the attempt ended, or was aborted, before its first token
            if not self._generation.goes_on:
                self._recorder.begin_anew()
                self._recorder.keep(output)
                return False
        self._recorder.begin_anew()
        return True


async def _rest_of(reply: Reply) -> bytes:
    """Read what follows the last event of a generation, normally ``[DONE]``, and close ``reply``.

    If the reply were closed before its end, the router would abort its rid at the engine. That would also abort the
    next attempt, which has the same rid.
    """
    rest = bytearray()
    with anyio.move_on_after(_END_S):
        try:
            last = False
            while not last and len(rest) < _END_BYTES:
                piece, last = await reply.next_piece()
                rest += piece
        except HTTPError:
            pass  # all that matters has come
    reply.close()
    return bytes(rest)


def _may_abort(whole: bytes) -> bool:
    """Return False when ``whole`` surely has no abort: its only finish reason is null, or it has no ``"abort"``.

    The finish reason is checked first, since a search for ``"abort"`` takes longer. Both searches for the reason begin
    at the end, since that takes less time than two searches from the beginning.
    """
    place = whole.rfind(_FINISH)
    goes_on = place >= 0 and whole.startswith(_GOES_ON, place) and whole.rfind(_FINISH, 0, place) < 0
    return not goes_on and _ABORT in whole


def _find_abort(whole: bytes) -> tuple[int, dict[str, Any] | None]:
    """Return the offset of the first abort in ``whole``, and its event; without an abort, the end and None."""
    place = whole.find(_ABORT)
    while place >= 0:
        start = last_end(whole[:place])
        try:
            event = _first_event(whole[start:])
        except orjson.JSONDecodeError:
            event = None  # no event of a generation
        if is_aborted(event):
            return start, event
        place = whole.find(_ABORT, place + len(_ABORT))
    return len(whole), None


def _taken(merged: MergedResponse, event: dict[str, Any]) -> int:
    """Call :meth:`MergedResponse.take`. Raises WorkerBroke."""
    try:
        return merged.take(event)
    except ValueError as error:
        raise WorkerBroke(f"a worker's stream is not understood: {error}", answered=True) from None


def _event_in(data: bytes) -> dict[str, Any] | None:
    """Return the generation's event in ``data``, or None if there is none. Raises WorkerBroke if it is invalid."""
    try:
        event = parsed(data, keeps_arrays=True)
        return read_event(event) if "meta_info" in event else None
    except (TypeError, ValueError) as error:
        raise WorkerBroke(f"a worker's stream is not understood: {error}", answered=True) from None


def _read_alone(event: Any) -> dict[str, Any] | None:
    """Return ``event``, the first of its stream, as an unstreamed answer; None if it is invalid."""
    try:
        return whole_answer(event)
    except ValueError:
        return None


def _with_end(data: bytes) -> bytes:
    """Return ``data`` if it has ``[DONE]``, else its first event and ``[DONE]``."""
    events = events_in(data + b"\n\n")
    return data if _DONE in events else _EVENT % events[0] + _EVENT % _DONE


def _first_event(data: bytes) -> Any:
    """Return the first event of ``data``, parsed; None when there is none."""
    events = events_in(data + b"\n\n")
    return parsed(events[0], keeps_arrays=True) if events else None
