"""A stream that goes on where an aborted one ended: what is new is put behind what the client knows."""

from __future__ import annotations

from typing import Any

import orjson

from router_core.errors import HTTPError, WorkerBroke
from router_core.reply import Reply
from slime_resume.contracts import StreamRecorder
from slime_resume.generation import Generation
from slime_resume.response_merger import MergedResponse
from slime_resume.stream_end import rest_of
from slime_sglang import AnswerSoFar, is_aborted, read_event
from slime_sglang.bodies import parsed
from slime_sglang.events import EventSplitter

__all__ = ["ContinuedStream"]

_DONE = b"[DONE]"


class ContinuedStream:
    """The rest of a response that begins with ``so_far``, of which the client was ``told`` a part.

    It is cumulative or incremental as that was. While that is unknown, nothing is told: it might be said twice.
    ``recorder`` gets all of it when it is aborted again.
    """

    def __init__(
        self, generation: Generation, told: AnswerSoFar, so_far: AnswerSoFar, recorder: StreamRecorder
    ) -> None:
        self._generation = generation
        self._recorder = recorder
        self._merged = generation.merge(so_far.answer)
        self._merged.see_mode(so_far)
        recorder.doubt = self._merged.doubt
        self._tokens, self._characters = len(told.ids), len(told.text)
        self._aborted: dict[str, Any] | None = so_far.answer
        self._reply: Reply | None = None
        self._events = EventSplitter()
        self._ready: list[bytes] = []
        self.finished = False

    async def read(self) -> bytes:
        """See BodySource."""
        while not self._ready and not self.finished:
            if self._merged.ended and self._aborted is not None:
                self._tell()
                self._end()
            elif self._aborted is not None:
                await self._go_on(self._aborted)
            else:
                await self._take_piece()
        ready, self._ready = b"".join(self._ready), []
        return ready

    def close(self) -> None:
        """See BodySource."""
        if self._reply is not None:
            self._reply.close()

    async def _go_on(self, aborted: dict[str, Any]) -> None:
        before = len(self._merged.ids)

        async def attempt() -> bool | None:
            reply = await self._generation.ask_again(self._merged.ids, self._merged.rid)
            if reply is None:
                return None
            self._reply, self._events = reply, EventSplitter()
            self._merged.begin()
            self._aborted = None
            try:
                while not self._ready and self._aborted is None and not self.finished:
                    await self._take_piece()
            except HTTPError:
                if len(self._merged.ids) > before:
                    raise  # it breaks off in the middle, as any stream may
            if len(self._merged.ids) > before or self._merged.ended:
                return True
            self._generation.rest(reply)
            self._aborted, self._ready, self.finished = aborted, [], False  # an error, or nothing at all
            return None

        if await self._generation.try_again(aborted, attempt, at_once=True) is None:
            self._tell()
            self._end()

    async def _take_piece(self) -> None:
        assert self._reply is not None  # narrowing: an attempt is under way
        piece, last = await self._reply.next_piece()
        for data in self._events.feed(piece):
            event = _event_in(data) if data != _DONE and not self._merged.ended else None
            if event is None:
                self._ready.append(b"data: %s\n\n" % data)
                continue
            news = _taken(self._merged, event)
            if is_aborted(event) and not self._merged.ended:
                if self._merged.ids:
                    self._recorder.keep(self._merged.answer())
                await rest_of(self._reply)
                self._aborted = event
                return
            if self._merged.ended or (news and not (self._tokens and self._merged.incremental is None)):
                self._tell()
            if self._merged.stopped or is_aborted(event):
                self._end()  # the engine does not know
                return
        if last and self._tokens < len(self._merged.ids):
            self._tell()
        self.finished = last

    def _tell(self) -> None:
        merged = self._merged
        new = (
            merged.event(self._tokens, self._characters)
            if self._tokens and merged.incremental
            else merged.answer()
        )
        self._tokens, self._characters = len(merged.ids), merged.text_length
        self._ready.append(b"data: %s\n\n" % orjson.dumps(new))

    def _end(self) -> None:
        self.close()
        self._ready.append(b"data: %s\n\n" % _DONE)
        self.finished = True


def _taken(merged: MergedResponse, event: dict[str, Any]) -> int:
    """As :meth:`MergedResponse.take`. Raises WorkerBroke."""
    try:
        return merged.take(event)
    except ValueError as error:
        raise WorkerBroke(f"a worker's stream is not understood: {error}", answered=True) from None


def _event_in(data: bytes) -> dict[str, Any] | None:
    """Return the generation's event in ``data``; None when it has none. Raises WorkerBroke when it makes no sense."""
    try:
        event = parsed(data)
        return read_event(event) if "meta_info" in event else None
    except (TypeError, ValueError) as error:
        raise WorkerBroke(f"a worker's stream is not understood: {error}", answered=True) from None
