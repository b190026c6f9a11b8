"""Measures each request, also those that are refused or that the router answers itself.

``benchmarks/metrics.py`` measures what this costs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_http.error_codes import MAX_ERROR_BYTES
from slime_http.lifespan import APP, OBSERVERS
from slime_http.observed import ObservedRequest
from slime_metrics.counts import Counts

__all__ = ["Answer", "Measured"]


class Answer(ObservedRequest):
    """Observes the answer to a request by wrapping ``send``, under a server other than our own."""

    __slots__ = ("_inner", "_streams", "_time")

    def __init__(self, inner: Send, scope: Scope, time: Callable[[], float]) -> None:
        self._inner = inner
        self._time = time
        self.began = self.ended = time()
        self.scope = scope
        self.status = 0
        self.streamed_at = 0.0
        self.error = b""
        self.is_whole = self._streams = False

    def send(self, message: Message) -> Awaitable[None]:
        """Observe ``message``, and pass it on."""
        if not self.status:
            self.status = message.get("status", 0)
        else:
            body = message.get("body", b"")
            if self.status >= 400 and not self.error:
                self.error = bytes(body)[:MAX_ERROR_BYTES]
            self.is_whole = not message.get("more_body")
            self._streams = self._streams or not self.is_whole
            if body and self._streams and not self.streamed_at:
                self.streamed_at = self._time()
        return self._inner(message)


class Measured:
    """ASGI middleware that measures requests. The router's own server measures them itself, which costs less.

    ``is_observing``: the server reports its requests. The application to serve is the method ``serve``, since calling
    an object costs more.
    """

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts
        self.is_observing = False
        self.time: Callable[[], float] = monotonic  # until the event loop is there

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the application."""
        if scope["type"] == "http":
            if not self.is_observing:
                return self._watched({**scope, "state": dict(scope.get("state") or {})}, receive, send)
        elif scope["type"] == "lifespan":
            self._begin(scope.get("extensions", {}))
        return self._app(scope, receive, send)

    def _begin(self, extensions: MutableMapping[str, Any]) -> None:
        """Ask the server that starts the application to report its requests, if it can."""
        self.is_observing = OBSERVERS in extensions
        if self.is_observing:
            extensions[OBSERVERS].append(self._counts.add)
            if extensions[APP] == self.serve:
                extensions[APP] = self._app

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, scope, self.time)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.ended = self.time()
            self._counts.add(answer)
