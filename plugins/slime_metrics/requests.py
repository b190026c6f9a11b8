"""Measures each request, also those that are refused or that the router answers itself.

This code runs for each request, so it avoids calls and coroutines; ``benchmarks/metrics.py`` measures it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from router_core.proxy import PATH, SENT_AT, WORKER
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_http.error_codes import MAX_ERROR_BYTES
from slime_http.lifespan import OBSERVERS
from slime_http.server_request import ServerRequest
from slime_metrics.counts import QUICK_S, Counts, Series
from slime_metrics.histogram import BATCH

__all__ = ["Answer", "Measured"]


class Answer:
    """Wraps ``send`` of another server than our own, and has the attributes of a ServerRequest."""

    def __init__(self, inner: Send, scope: Scope, time: Callable[[], float]) -> None:
        self._inner = inner
        self._time = time
        self.began = time()
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
                self.error = bytes(body)[:MAX_ERROR_BYTES]
            self.complete = not message.get("more_body")
            self._streams = self._streams or not self.complete
            if body and self._streams and not self.streamed_at:
                self.streamed_at = self._time()
        return self._inner(message)


class Measured:
    """ASGI middleware that measures requests. Our own server is asked to measure, which costs less.

    ``is_observing``: the server reports its requests. The application to serve is the method ``serve``, since calling
    an object costs more.
    """

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts
        self._series: dict[Any, Series] = counts.series
        self.is_observing = False
        self.time: Callable[[], float] = monotonic  # until the event loop is there

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the application."""
        if not self.is_observing:
            if scope["type"] == "http":
                return self._watched({**scope, "state": dict(scope.get("state") or {})}, receive, send)
            observers = scope.get("extensions", {}).get(OBSERVERS)
            if observers is not None:
                observers.append(self._end)
                self.is_observing = True
        return self._app(scope, receive, send)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, scope, self.time)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._end(answer)

    def _end(self, answer: Answer | ServerRequest) -> None:
        scope, began, status = answer.scope, answer.began, answer.status
        state = scope["state"]
        try:
            series = self._series[scope["method"], scope["path"], status, state[WORKER].url]
            waited_s = state[SENT_AT] - began
        except KeyError:  # no worker has answered, the path was changed, or it is the first such request
            path = state.get(PATH, scope["path"])
            worker = state[WORKER].url if WORKER in state else ""
            series = self._counts.of(scope["method"], path, status, worker)
            waited_s = state.get(SENT_AT, began) - began
        whole_s = self.time() - began
        new = series.new
        new.append(whole_s)
        if len(new) >= BATCH:
            series.whole.settle()
        if waited_s > QUICK_S:
            series.waited(whole_s, waited_s)
        if status != 200 or answer.streamed_at or not answer.complete:
            self._note_unusual(series, answer)

    def _note_unusual(self, series: Series, answer: Answer | ServerRequest) -> None:
        if answer.streamed_at:
            series.to_first_byte.observe(answer.streamed_at - answer.began)
        if not answer.complete:
            series.incomplete += 1
        if answer.status >= 400:
            self._counts.error(answer.status, answer.error)
