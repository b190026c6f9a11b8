"""The plugin: it answers calls to all engines, and lets generation requests wait during a pause."""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from router_core import Exchange, Reply, Worker, hookimpl
from router_core.errors import Aborted, BadRequest, HTTPError, ShuttingDown, WorkerUnreachable
from router_core.flags import add_flags
from router_core.pool import WorkerPool
from router_core.request import Request
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_control.calls.bodies import names_read
from slime_control.calls.endpoints import CALLS, Call
from slime_control.calls.fan_out import CONNECTIONS, FanOut
from slime_control.calls.one_engine import not_controlled, not_loaded, refusal
from slime_control.calls.overview import QUESTIONS, Overview
from slime_control.fleet import Fleet
from slime_control.pausing.abort_sender import AbortSender
from slime_control.pausing.aborted import aborted_reply, answer_rids
from slime_control.pausing.events import ControlEvents
from slime_control.pausing.gate import Gate
from slime_control.pausing.under_way import UnderWay, renamed_by_the_engine, rids_of
from slime_control.settings import Settings
from slime_control.weights.quiet_period import QuietPeriod
from slime_logging.waits import Waits
from slime_sglang.aborts import abort_prefix, check_rid
from slime_sglang.generation import at_generation, generates
from slime_sglang.misspelt_paths import WrongMethod

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["Control", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

_READING = ("GET", "HEAD")
_DROPS_CACHES = ("/flush_cache", "/release_memory_occupation")


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Control:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return Control(Settings.from_options(options))


class Control:
    """The control plane.

    It answers control calls in ``pre_request``, after all other plugins. So other plugins see a control call as they
    see a proxied request, and see its outcome when the exchange ends.
    """

    under_way: UnderWay  # set in setup
    _pool: WorkerPool  # set in setup

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.events = ControlEvents()
        self.gate = Gate(self._paused)
        self.quiet_period = QuietPeriod(self.gate)
        self._router: Router | None = None
        self._fleet: Fleet | None = None
        self._abort_sender: AbortSender | None = None
        self._overview: Overview | None = None
        self._waits = Waits()

    def _paused(self, paused: bool) -> None:
        self.events.pause(paused)
        if paused:
            longest_s = self.settings.pause_queue_timeout_s
            logger.info(
                "generation is paused: new requests wait, %g s at most (--pause-queue-timeout-s)", longest_s
            )
        else:
            logger.info(
                "generation continues after %.1f s; %d requests waited", self.gate.closed_s, self.gate.waiting
            )

    @hookimpl
    def setup(self, router: Router) -> None:
        self._waits = Waits(router.components.find)
        self._pool = router.pool
        self.under_way = UnderWay(lambda: router.clients.exchanges)
        router.components.register("pending_aborts", self)
        router.components.register("quiet_period", self.quiet_period)
        router.components.register("control_events", self.events)
        self.events.subscribe(self._abort_waiting)
        metrics: Metrics | None = router.components.find("metrics")
        if metrics is not None:
            metrics.gauge(
                "slime_generation_paused", "1: new generations wait, since the engines are paused.",
                lambda: float(self.events.paused),
            )  # fmt: skip
            metrics.gauge(
                "slime_requests_paused", "Generations that wait for the end of a pause.",
                lambda: self.gate.waiting,
            )  # fmt: skip

    async def settled(self, worker: Worker, exchange: Exchange) -> None:
        """See :class:`slime_control.contracts.PendingAborts`."""
        if self._abort_sender is not None:
            with self.under_way.waiting(exchange):
                await self._abort_sender.settled(worker)
        if exchange.client_disconnected:
            raise Aborted("the request was aborted before it was tried again")

    def rename(self, request: Request) -> bool:
        """See :class:`slime_control.contracts.PendingAborts`."""
        return self.under_way.rename(request)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        settings = self.settings
        connect_s = min(router.settings.connect_timeout_s, settings.control_timeout_s)
        async with FanOut(
            router.worker_transport(limits=CONNECTIONS), settings.control_timeout_s, connect_s
        ) as fan_out:
            self._router = router
            self._fleet = Fleet(router, fan_out, self.gate, self.under_way)
            self._overview = Overview(router, fan_out)
            router.tasks.start_soon(self._end_of_waiting, router)
            self._abort_sender = abort_sender = AbortSender(router)
            router.tasks.start_soon(abort_sender.run)
            try:
                yield
            finally:
                abort_sender.close()
                self._router = self._fleet = self._abort_sender = self._overview = None

    async def _end_of_waiting(self, router: Router) -> None:
        await router.stopping.wait()
        self.gate.end()

    @hookimpl(trylast=True)
    def pre_request(self, exchange: Exchange) -> Awaitable[Reply | None] | None:
        request = exchange.request
        if not (self.gate.closed or request.is_long_work or self._pool.passthrough) and generates(request):
            self.under_way.ensure_rid(exchange)
            return None
        return self._control(exchange)

    async def _control(self, exchange: Exchange) -> Reply | None:
        request, router = exchange.request, self._router
        if self._pool.passthrough:
            if request.path in CALLS:
                raise not_controlled(request.path)
            return await self._of_fleet(request)
        if generates(request):
            if request.is_long_work and router is not None:
                await router.read_ahead(exchange, b"rid", b"n")
            if self.gate.closed:
                reply = await self._pass(exchange)
                if reply is not None:
                    return reply
            self.under_way.ensure_rid(exchange)
            return None
        path = request.path
        call = CALLS.get(path)
        if call is None:
            if (unknown := not_loaded(path)) is not None:
                raise unknown
            return await self._of_fleet(request)
        if request.method not in call.methods:
            raise WrongMethod(call.methods)
        if request.is_long_work and router is not None:
            await router.read_ahead(exchange, *names_read(request))
        if path == "/abort_request" and (prefix := abort_prefix(request)) is not None:
            self.events.abort(prefix)
        return await self._finish_call(call, request)

    async def _of_fleet(self, request: Request) -> Reply | None:
        """Return the answer to a question for all engines; None when the request may go to any engine.

        Raises HTTPError.
        """
        path = request.path
        if path in QUESTIONS:
            if request.method not in _READING:
                raise WrongMethod(_READING)
            assert self._overview is not None  # narrowing: it is set while the router serves
            return await self._overview.answer(path)
        if (refused := refusal(path)) is not None:
            raise refused
        return None

    @hookimpl
    def client_gone(self, exchange: Exchange) -> bool:
        """Abort a request that is not streamed. Returns True to wait for the tokens that the engine has sampled.

        A stream needs no wait, since its tokens so far have arrived: :meth:`attempt_failed` aborts it.
        """
        request, worker, reply = exchange.request, exchange.worker, exchange.reply
        streams = reply is not None and reply.body is None
        if worker is None or streams or renamed_by_the_engine(request):
            return False
        return self._abort(worker, request)

    @hookimpl
    def attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
        """Abort ``request``, since nobody will read its answer. An unreachable ``worker`` never got the request."""
        if not isinstance(error, WorkerUnreachable):
            self._abort(worker, request)

    def _abort(self, worker: Worker, request: Request) -> bool:
        """Abort ``request`` at ``worker``. Returns True when the request has rids, and an abort of each is on its way.

        An abort that would end other requests is not sent: the engine notices the closed connection seconds later.
        """
        if self._abort_sender is None or worker.passthrough or not at_generation(request):
            return False
        rids = rids_of(request) or []
        sendable = [rid for rid in rids if not self.under_way.ends_others(rid, rids)]
        for rid in sendable:
            self._abort_sender.end(worker, rid)
        return bool(rids) and len(sendable) == len(rids)

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if self._fleet is not None:
            self._fleet.worker_changed(worker, change)

    @hookimpl
    def weights_confirmed(self, worker: Worker) -> None:
        if self._fleet is not None:
            self._fleet.weights_confirmed(worker)

    async def _pass(self, exchange: Exchange) -> Reply | None:
        """Wait until generation continues. Returns the answer to a ``/generate`` that is aborted meanwhile, else None.

        Raises Paused, ShuttingDown and BadRequest. Raises Aborted for an aborted request that is no ``/generate``, or
        that asks for too many sequences.
        """
        assert self._router is not None  # narrowing: it is set while the router serves
        try:
            document = await self._router.read_json(exchange)
        except BadRequest:
            document = None  # the worker answers with its own error
        rids = answer_rids(document)
        check_rid(rids)
        with self._waits.during("pause"):
            goes_on = await self.gate.wait(rids, self.settings.pause_queue_timeout_s)
        if goes_on:
            return None
        reply = None
        if exchange.request.path == "/generate":
            reply = aborted_reply(document if isinstance(document, dict) else {}, rids)
        if reply is None:
            raise Aborted("the request was aborted while generation was paused")
        return reply

    def _abort_waiting(self, prefix: str) -> None:
        self.gate.abort(prefix)
        self.under_way.give_up(prefix)

    async def _finish_call(self, call: Call, request: Request) -> Reply:
        """Make ``call``. The call goes on when the client disconnects, so that all workers get the same weights."""
        router, fleet = self._router, self._fleet
        assert router is not None and fleet is not None  # narrowing: set while the router serves  # noqa: PT018
        done = anyio.Event()
        outcome: Reply | Exception = ShuttingDown("the router is shutting down")

        async def run() -> None:
            nonlocal outcome
            try:
                with self.quiet_period.during(call):
                    outcome = await fleet.call(call, request)
            except HTTPError as error:
                outcome = error
            except Exception as error:
                logger.exception("%s failed", call.path)
                outcome = error
            finally:
                if call.path in _DROPS_CACHES:
                    self.events.flush()
                done.set()

        router.tasks.start_soon(run)
        await done.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
