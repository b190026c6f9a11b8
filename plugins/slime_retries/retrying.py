"""The layer that sends a request to a worker, and to other workers when the first one fails."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from router_core import Exchange, Worker
from router_core.errors import HTTPError
from router_core.reply import Reply
from router_core.request import Request
from router_core.router import Router
from router_core.sender import Sender
from slime_logging.waits import Waits
from slime_retries.attempts import TEMPORARY, Attempts, Tally, changes_nothing
from slime_retries.beginning import begun
from slime_retries.breakers import Breakers
from slime_retries.settings import Settings

if TYPE_CHECKING:
    from slime_control.contracts import PendingAborts

__all__ = ["Retrying"]


class Retrying:
    """A Sender that repeats a request until the answer is good, as long as the settings allow it.

    A request that succeeds at once costs next to nothing more: breakers count successes only while at least one breaker
    tracks a failure.
    """

    def __init__(
        self, settings: Settings, breakers: Breakers, tally: Tally, router: Router, inner: Sender
    ) -> None:
        self._settings = settings
        self._tally = tally
        self._breakers = breakers
        self._pool = router.pool
        self._pending_aborts: PendingAborts | None = router.components.find("pending_aborts")
        self._waits = Waits(router.components.find)
        self._inner = inner

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Do nothing: each attempt chooses its worker."""

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """See :class:`router_core.sender.Sender`."""
        outcome: Reply | HTTPError
        breakers, inner = self._breakers, self._inner
        try:
            if breakers.troubled:
                outcome = reply = await self._ask(exchange, request)
            else:  # fast path: no breaker tracks a failure
                inner.choose(exchange)
                outcome = reply = await inner.send(exchange, request)
                if reply.body is None or reply.status >= 500 or breakers.troubled:
                    await self._begun(exchange, request, reply)
        except HTTPError as error:
            outcome = error
        else:
            if reply.status not in TEMPORARY:
                return reply
        attempts = Attempts(
            self._settings, self._pool, self._ask, exchange, request, outcome, self._tally, self._waits
        )
        return await attempts.run()

    async def _ask(
        self,
        exchange: Exchange,
        request: Request,
        but: Collection[Worker] = (),
        failed: Collection[Worker] = (),
    ) -> Reply:
        """Make one attempt at a worker outside ``but``. ``failed``: workers of failed attempts. Raises HTTPError."""
        inner, breakers = self._inner, self._breakers
        inner.choose(exchange, but)
        assert exchange.worker is not None  # narrowing: it was chosen
        worker = exchange.worker.server
        if breakers.troubled:
            breakers.begin(worker, request)  # no await since the choice: one probe at a time
        try:
            if worker in failed and self._pending_aborts is not None:
                # An abort of the earlier attempt at this worker may still be on the way.
                await self._pending_aborts.settled(worker, exchange)
            reply = await inner.send(exchange, request)
        except BaseException:
            breakers.ended(worker, request, well=False)
            raise
        await self._begun(exchange, request, reply)
        return reply

    async def _begun(self, exchange: Exchange, request: Request, reply: Reply) -> None:
        """Wait for the beginning of ``reply`` if the request may be retried until then. Raises HTTPError."""
        assert exchange.worker is not None  # narrowing: it has answered
        worker = exchange.worker.server
        try:
            if reply.status not in TEMPORARY and reply.body is None and changes_nothing(request):
                await begun(reply)
        except BaseException:
            reply.close()
            self._breakers.ended(worker, request, well=False)
            raise
        self._breakers.answered(worker, request, reply)
