"""ASGI middleware that refuses a request before any part of its body is read."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from router_core.client import send_error
from router_core.errors import HTTPError
from router_core.types import ASGIApp, Receive, Scope, Send
from slime_auth.access import Guard, Level
from slime_auth.audit import audited
from slime_auth.browsers import Pages
from slime_auth.refusals import Refusals

if TYPE_CHECKING:
    from slime_access_log.contracts import RequestLog

__all__ = ["Guarded", "KeptFromPages"]


class KeptFromPages:
    """Refuses requests that web pages of other sites may not send, before their body is read."""

    def __init__(self, app: ASGIApp, pages: Pages, refusals: Refusals) -> None:
        self._app = app
        self._pages = pages
        self._refusals = refusals

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        refusal = self._pages.refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            return self._app(scope, receive, send)
        self._refusals.add(scope, refusal)
        return send_error(refusal, send, unread=receive)


class Guarded:
    """Refuses requests without the key that they need, before their body is read."""

    def __init__(
        self, app: ASGIApp, guard: Guard, refusals: Refusals, log: RequestLog | None, *, audit: bool
    ) -> None:
        self._app = app
        self._guard = guard
        self._refusals = refusals
        self._log = log
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        decision = await self._guard.authorize(scope)
        name = decision.caller.name
        if self._log is not None and name is not None:
            self._log.authenticated(name)
        if self._audit and decision.needed is Level.ADMIN:
            with audited(decision, scope, send) as watched:
                await self._answer(decision.refusal, scope, receive, watched)
        else:
            if decision.refusal is not None:
                self._refusals.add(scope, decision.refusal, name)
            await self._answer(decision.refusal, scope, receive, send)

    async def _answer(self, refusal: HTTPError | None, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await send_error(refusal, send, unread=receive)
