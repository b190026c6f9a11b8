"""An answer as a stream of chunks, made from the engine's events as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import orjson

from router_core.errors import HTTPError, ShuttingDown, WorkerBroke
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request_ids import log_prefix
from slime_http.asgi import note_failure
from slime_openai.errors import error_body
from slime_openai.responses.openai_schema import DONE, Frame, event
from slime_openai.responses.outputs import EngineRefused, understood
from slime_sglang.event_readers import Growth, Reading, reader_of
from slime_sglang.events import EventSplitter, data_in

__all__ = ["AnswerStream", "StreamedChoice"]

logger = logging.getLogger(__name__)


class StreamedChoice(Protocol):
    """One sequence of a streamed answer."""

    @property
    def ended(self) -> bool:
        """True when the whole sequence has come."""
        ...

    @property
    def wants_text_only(self) -> bool:
        """True when the client needs only the new text of each event before the last event."""
        ...

    def chunks(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks, in OpenAI's form, that the engine's event ``answer`` adds."""
        ...

    def more(self, text: str, event: bytes | memoryview) -> list[dict[str, Any]]:
        """Return the chunks that ``event`` adds, when only its new ``text`` was read."""
        ...

    def about(self) -> dict[str, Any]:
        """Return members that stand beside ``choices`` in the sequence's last chunk."""
        ...

    def end(self) -> None:
        """End the sequence. A second call does nothing."""
        ...


class AnswerStream:
    """A BodySource that makes OpenAI's chunks from ``reply``, the engine's stream.

    ``exchange``: the exchange of the ``/generate`` request; :meth:`close` closes it.

    ``usage``: returns the usage for a chunk at the end; None: no such chunk. ``beginning``: members that stand beside
    ``choices`` in the first chunk.
    """

    def __init__(
        self,
        exchange: Exchange,
        reply: Reply,
        choices: Sequence[StreamedChoice],
        frame: Frame,
        usage: Callable[[], dict[str, Any]] | None,
        beginning: dict[str, Any] | None = None,
    ) -> None:
        self._exchange = exchange
        self._reply = reply
        self._choices = choices
        self._frame = frame
        self._usage = usage
        self._beginning = beginning or {}
        self._events = EventSplitter()
        self._reader = reader_of(exchange, reply)
        self._failure: HTTPError | None = None
        self._take: Callable[[Callable[[], bytes]], bool] | None = None
        self.finished = False

    async def read(self) -> bytes:
        """See BodySource. If the engine fails in mid-stream, the stream ends with an error event.

        A stream that the router cuts off as it shuts down also ends with an error event, if this event can be sent at
        once.
        """
        ready: list[bytes] = []
        while not ready and not self.finished:
            try:
                if self._failure is not None:
                    raise self._failure
                piece, last = await self._reply.next_piece()
                with understood():
                    for number, data in enumerate(self._events.feed(piece)):
                        if data != b"[DONE]":
                            ready += self._chunks(data, self._reading(number, data))
                    if last:
                        ready += self._ending()
            except HTTPError as error:
                self._report(error)
                ready.append(_last_events(error))
                self.finished = True
            except asyncio.CancelledError:
                self._send_shutdown_error()
                raise
        return b"".join(ready)

    async def pump(self, take: Callable[[Callable[[], bytes]], bool]) -> None:
        """See :meth:`Reply.pump`. Passes on events that only add text, while ``take`` can send their chunks at once."""
        reader = self._reader
        if reader is None or self.finished:
            return

        def pass_on(piece: bytes, feeds: Iterable[Callable[[bytes], None]]) -> bool:
            growth = reader.growth(piece)
            if growth is None or not self._suffices(growth):
                return False
            return take(lambda: self._pass_on(piece, growth, feeds))

        self._take = take
        try:
            await self._reply.pump(pass_on)
        except HTTPError as error:
            self._failure = error  # for the next read
        except asyncio.CancelledError:
            self._send_shutdown_error()
            raise

    def _report(self, error: HTTPError) -> None:
        """Log ``error``, and note it for the metrics and the request log: the answer's status 200 does not show it."""
        scope = self._exchange.scope
        if scope is not None:
            logger.warning("%sa reply broke off: %s", log_prefix(scope), error)
            note_failure(scope, error.code)

    def _send_shutdown_error(self) -> None:
        """Send an error event at once, unless the request was cancelled because its client disconnected."""
        if self._take is not None and not self._exchange.client_disconnected:
            self._take(lambda: _last_events(ShuttingDown("the router is shutting down")))
            self.finished = True

    def _pass_on(self, piece: bytes, growth: Growth, feeds: Iterable[Callable[[bytes], None]]) -> bytes:
        for feed in feeds:
            feed(piece)
        with understood():
            return b"".join(self._more(growth, data_in(piece)))

    def _reading(self, number: int, data: bytes) -> Reading:
        return self._reader.reading(number, data) if self._reader is not None else None

    def _suffices(self, growth: Growth) -> bool:
        """Return True if the client needs only the text of ``growth``, and has got all text before it."""
        index = growth[0]
        choice = self._choices[index] if index < len(self._choices) else None
        return choice is not None and choice.wants_text_only and not choice.ended

    def _more(self, growth: Growth, data: bytes | memoryview) -> list[bytes]:
        """Return the chunks of ``growth``, which was read from the event ``data``."""
        index, text = growth
        return [self._chunk(each) for each in self._choices[index].more(text, data)]

    def close(self) -> None:
        """See BodySource."""
        self._take = None
        self._exchange.close()
        with suppress(WorkerBroke), understood():
            for choice in self._choices:
                choice.end()

    def _chunks(self, data: bytes, reading: Reading) -> list[bytes]:
        if isinstance(reading, tuple) and self._suffices(reading):
            return self._more(reading, data)
        answer: Any = reading if isinstance(reading, dict) else orjson.loads(data)
        if "meta_info" not in answer:
            raise EngineRefused(502, data)
        index = answer.get("index", 0)
        if not 0 <= index < len(self._choices):
            raise ValueError(f"wanted one of {len(self._choices)} sequences, got number {index}")
        choice = self._choices[index]
        if choice.ended:
            return []
        chunks = choice.chunks(answer)
        if not choice.ended:
            return [self._chunk(each) for each in chunks]
        *others, last = chunks
        return [*map(self._chunk, others), self._chunk(last, **choice.about())]

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        beginning, self._beginning = self._beginning, {}
        return event(self._frame.put([choice], **beginning, **more))

    def _ending(self) -> list[bytes]:
        if not all(choice.ended for choice in self._choices):
            raise WorkerBroke("the engine's stream ended before its answer was complete", answered=True)
        self.finished = True
        usage = [event(self._frame.put([], usage=self._usage()))] if self._usage is not None else []
        return [*usage, DONE]


def _last_events(error: HTTPError) -> bytes:
    return b"data: %b\n\n%b" % (error_body(error), DONE)
