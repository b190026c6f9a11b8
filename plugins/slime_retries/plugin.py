"""The plugin: each request for a worker goes through here; what fails is left to Attempts and to Breakers."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router_core import Exchange, Worker, hookimpl
from router_core.errors import HTTPError
from router_core.reply import Reply
from router_core.request import Request
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_retries.attempts import TEMPORARY, Attempts, changes_nothing
from slime_retries.beginning import begun
from slime_retries.breaker import Thresholds
from slime_retries.breakers import Breakers
from slime_retries.settings import Settings

if TYPE_CHECKING:
    from slime_control.contracts import Endings

__all__ = ["Retries", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    default, breaker = Settings(), Thresholds()
    parser.add_argument(
        "--retry-max-retries", type=int, default=default.attempts, metavar="N",
        help="how often a request is tried, the first time included (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-initial-backoff-ms", type=float, default=default.initial_backoff_s * 1000, metavar="MS",
        help="wait before the second attempt (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-max-backoff-ms", type=float, default=default.max_backoff_s * 1000, metavar="MS",
        help="longest wait between two attempts (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-backoff-multiplier", type=float, default=default.backoff_multiplier, metavar="FACTOR",
        help="growth of the wait from one attempt to the next (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-jitter-factor", type=float, default=default.jitter, metavar="SHARE",
        help="share of the wait, 0 to 1, that is left to chance (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--disable-retries", action="store_true", help="try each request once")
    parser.add_argument(
        "--cb-failure-threshold", type=int, default=breaker.failures, metavar="N",
        help="failures in a row that open a worker's circuit breaker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-success-threshold", type=int, default=breaker.successes, metavar="N",
        help="successes in a row that close it again (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-timeout-duration-secs", type=float, default=breaker.timeout_s, metavar="S",
        help="how long it stays open before the worker is tried again (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-window-duration-secs", type=float, default=breaker.window_s, metavar="S",
        help="time within which these failures must fall (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--disable-circuit-breaker", action="store_true", help="do without circuit breakers")


def make_plugin(options: argparse.Namespace) -> Retries:
    """The plugin with the flags of the command line. Raises SettingsError."""
    return Retries(Settings.from_options(options))


class Retries:
    """Asks a worker; when that fails, asks others. Costs a request that goes well next to nothing."""

    _router: Router  # from setup on
    _breakers: Breakers
    _endings: Endings | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router
        self._breakers = Breakers(self.settings.breaker, router.pool)
        router.components.register("breakers", self._breakers)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._endings = router.components.get("endings") if "endings" in router.components else None
        try:
            yield
        finally:
            self._breakers.close()

    @hookimpl(trylast=True)  # another plugin may know a better way for some requests
    async def forward(self, exchange: Exchange, request: Request) -> Reply:
        outcome: Reply | HTTPError
        breakers, dispatcher = self._breakers, self._router.dispatcher
        try:
            if breakers.troubled:
                outcome = reply = await self._ask(exchange, request)
            else:  # as almost always: the same, without the ado
                dispatcher.choose(exchange)
                outcome = reply = await dispatcher.send(exchange, request)
                if not reply.arrived or reply.status >= 500 or breakers.troubled:
                    await self._begun(exchange, request, reply)
        except HTTPError as error:
            outcome = error
        else:
            if reply.status not in TEMPORARY:
                return reply
        return await Attempts(self.settings, self._router.pool, self._ask, exchange, request, outcome).run()

    async def _ask(
        self,
        exchange: Exchange,
        request: Request,
        but: Collection[Worker] = (),
        failed: Collection[Worker] = (),
    ) -> Reply:
        """One attempt, with none ``but`` these; those that ``failed`` had one before. Raises HTTPError."""
        dispatcher, breakers = self._router.dispatcher, self._breakers
        worker = dispatcher.choose(exchange, but)
        if breakers.troubled:
            breakers.begin(worker, request)  # in one step with the choice: one probe at a time
        try:
            if worker in failed and self._endings is not None:
                # It may still be told to end the attempt before this one.
                await self._endings.settled(worker, exchange)
            reply = await dispatcher.send(exchange, request)
        except BaseException:
            breakers.ended(worker, request, well=False)
            raise
        await self._begun(exchange, request, reply)
        return reply

    async def _begun(self, exchange: Exchange, request: Request, reply: Reply) -> None:
        """The head of ``reply`` is there: wait for its beginning. Raises HTTPError."""
        assert exchange.worker is not None  # narrowing: it has answered
        worker = exchange.worker.server
        try:
            if reply.status not in TEMPORARY and not reply.arrived and changes_nothing(request):
                await begun(reply)
        except BaseException:
            reply.close()
            self._breakers.ended(worker, request, well=False)
            raise
        self._breakers.answered(worker, request, reply)

    @hookimpl
    def attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
        if error is not None:
            self._breakers.failed(worker, request, str(error))

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change in ("added", "removed", "readmitted"):
            self._breakers.forget(worker)
