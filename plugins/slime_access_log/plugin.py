"""The plugin: it collects the facts about each request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from router_core import Exchange, hookimpl
from router_core.errors import BadRequest
from router_core.request_ids import DEFAULT_HEADERS, RequestIds
from router_core.router import Router
from router_core.sender import Sender
from router_core.types import ASGIApp
from slime_access_log.middleware import Current, Logged, NotingSender
from slime_access_log.record import Record
from slime_logging import hidden_key
from slime_logging.waits import Wait
from slime_sglang.bodies import EVENTS, media_type
from slime_sglang.generation import at_generation
from slime_sglang.usage import UsageTap

if TYPE_CHECKING:
    from slime_radix_cache.contracts import RecordedTokens

__all__ = ["AccessLog", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--access-log", action="store_true",
        help="log a line for each request, and give each request an id (--request-id-headers)",
    )  # fmt: skip


def make_plugin(options: argparse.Namespace) -> AccessLog | None:
    """Return the plugin, or None without ``--access-log``: then requests pay nothing for it."""
    return AccessLog() if options.access_log else None


class AccessLog:
    """Logs each request. The component ``"request_log"``."""

    def __init__(self) -> None:
        self._current: Current = ContextVar("record", default=None)
        self._recorded: RecordedTokens | None = None

    @hookimpl(tryfirst=True)  # other plugins look for the component in their setup
    def setup(self, router: Router) -> None:
        router.components.register("request_log", self)
        router.carried_headers.update(self._made_headers(router))

    def authenticated(self, name: str) -> None:
        """See :class:`slime_access_log.contracts.RequestLog`."""
        if (record := self._current.get()) is not None:
            record.caller = name

    @contextmanager
    def waiting(self, why: Wait) -> Iterator[None]:
        """See :class:`slime_access_log.contracts.RequestLog`."""
        record = self._current.get()
        if record is None:
            yield
            return
        with record.waiting(why):
            yield

    @hookimpl(tryfirst=True)  # outside of most layers: it sees refused requests, and original paths
    def asgi_middleware(self, app: ASGIApp, router: Router) -> ASGIApp:
        self._recorded = router.components.find("verdicts")  # all plugins are set up
        app = Logged(app, self._current)
        names = self._made_headers(router)
        return RequestIds(app, names) if names else app

    def _made_headers(self, router: Router) -> tuple[bytes, ...]:
        """Return the names of headers for this plugin's request ids; none if ``--request-id-headers`` makes ids."""
        if router.settings.request_id_headers:
            return ()
        return tuple(name.encode() for name in DEFAULT_HEADERS)

    @hookimpl(trylast=True)  # among the innermost: it sees each attempt, and its worker
    def sender(self, inner: Sender, router: Router) -> Sender:
        return NotingSender(inner, self._current, router.pool)

    @hookimpl(tryfirst=True)  # also for a request that another plugin refuses
    def pre_request(self, exchange: Exchange) -> None:
        record = self._current.get()
        if record is None:
            return
        if exchange.parent is None:
            with suppress(BadRequest):  # the plugin that needs the session answers with this error
                record.session = hidden_key(exchange.session, exchange.request.headers)
        exchange.on_close(partial(self._note_tokens, record, exchange))

    @hookimpl(tryfirst=True)  # among the last to be called
    def post_response(self, exchange: Exchange) -> None:
        record, reply, request = self._current.get(), exchange.reply, exchange.request
        if record is None or reply is None or reply.status != 200 or exchange.parent is not None:
            return
        if exchange.worker is not None and at_generation(request) and self._of(exchange) is None:
            numbered = request.path == "/generate" and media_type(reply) == EVENTS
            reply.tap(UsageTap(record.add_tokens, numbered=numbered))

    def _of(self, exchange: Exchange) -> RecordedTokens | None:
        """Return the component that records the tokens of ``exchange``, or None."""
        found = self._recorded
        return found if found is not None and found.counts(exchange) is not None else None

    def _note_tokens(self, record: Record, exchange: Exchange) -> None:
        if exchange.reply is None or exchange.reply.status != 200:
            return  # an error has no tokens
        recorded = self._of(exchange)
        counts = recorded.counts(exchange) if recorded is not None else None
        if recorded is not None and counts is not None:
            record.add_tokens(counts._asdict())
            record.reasons += recorded.of(exchange)
