"""Measures each request by ASGI middleware around the application.

The cost of a request counts here: what could be a method or a coroutine is written out, see ``benchmarks/metrics.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Any

from router_core.proxy import SENT_AT, WORKER
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_http.asgi import SendNow, send_now_of
from slime_http.server_request import ServerRequest
from slime_metrics.counts import QUICK_S, Counts, Series

__all__ = ["Answer", "Measured"]

#: Bytes of an error's body that are searched for its code.
_MAX_ERROR_BYTES = 4096

#: Key of a scope: the time of the event loop, which costs least to read. uvloop's is that of the turn of the loop.
_BEGAN = "slime_metrics.began"


class Answer:
    """Wraps ``send`` and notes what a :class:`ServerRequest` notes: for other servers, and within other middleware."""

    __slots__ = (
        "_inner",
        "_inner_now",
        "_streams",
        "_time",
        "complete",
        "error",
        "scope",
        "status",
        "streamed_at",
    )

    def __init__(self, inner: Send, scope: Scope, time: Callable[[], float]) -> None:
        self._inner = inner
        self._time = time
        self.scope = scope
        self.status = 0
        self.streamed_at = 0.0
        self.error = b""
        self.complete = self._streams = False

    def send(self, message: Message) -> Awaitable[None]:
        """Pass ``message`` on."""
        if not self.status:
            self.status = message.get("status", 0)
        else:
            body = message.get("body", b"")
            if self.status >= 400 and not self.error:
                self.error = bytes(body)[:_MAX_ERROR_BYTES]
            self.complete = not message.get("more_body")
            self._streams = self._streams or not self.complete
            if body and self._streams and not self.streamed_at:
                self.streamed_at = self._time()
        return self._inner(message)

    @property
    def send_now(self) -> SendNow | None:
        """The server's way to take pieces of a stream without waking a task, if it has one."""
        inner = send_now_of(self._inner)
        if inner is None:
            return None
        self._inner_now = inner
        return self._send_now

    def _send_now(self, piece: Any, before: Iterable[Callable[[bytes], object]]) -> bool:
        if not self.streamed_at:
            self.streamed_at = self._time()
        return self._inner_now(piece, before)


class Measured:
    """ASGI middleware that measures all requests, also those that are refused or that the router answers itself."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts
        self._series: dict[Any, Series] = counts.series
        self._on_end = self._end
        self.time: Callable[[], float] = monotonic  # until the event loop is there

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        answer = getattr(send, "__self__", None)
        if type(answer) is ServerRequest and answer.scope is scope:
            answer.on_end = self._on_end
            scope[_BEGAN] = self.time()
            return self._app(scope, receive, send)
        own = {**scope, "state": dict(scope.get("state") or {}), _BEGAN: self.time()}
        return self._watched(own, receive, send)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, scope, self.time)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._end(answer)

    def _end(self, answer: Answer | ServerRequest) -> None:
        scope, status = answer.scope, answer.status
        state = scope["state"]
        worker = state[WORKER].url if WORKER in state else ""
        series = self._series.get((scope["method"], scope["path"], status, worker))
        if series is None:
            series = self._counts.of(scope["method"], scope["path"], status, worker)
        began = scope[_BEGAN]
        whole_s = self.time() - began
        whole = series.whole
        whole.counts[bisect_left(whole.bounds, whole_s)] += 1
        whole.total_s += whole_s
        if SENT_AT in state and state[SENT_AT] - began > QUICK_S:
            series.waited(whole_s, state[SENT_AT] - began)
        if status != 200 or answer.streamed_at or not answer.complete:
            self._note_unusual(series, answer, began)

    def _note_unusual(self, series: Series, answer: Answer | ServerRequest, began: float) -> None:
        if answer.streamed_at:
            series.to_first_byte.observe(answer.streamed_at - began)
        if not answer.complete:
            series.incomplete += 1
        if answer.status >= 400:
            self._counts.error(answer.status, answer.error)
