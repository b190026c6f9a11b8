"""The plugin: a generation waits for its slot, and returns the slot when its exchange ends, in whatever way."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from router_core import Exchange, hookimpl
from router_core.errors import Aborted, HTTPError, ShuttingDown
from router_core.flags import add_flags
from router_core.request import Request
from router_core.router import Router
from slime_limits.queues import FirstCome, LongestFirst, Queue, Rank, rank_of
from slime_limits.settings import Settings
from slime_limits.slots import Place, QueueFull, RefilledSlots, Slots
from slime_logging.waits import Waits
from slime_sglang.generation import GENERATION_PATHS

if TYPE_CHECKING:
    from slime_control.contracts import ControlEvents
    from slime_metrics.contracts import Metrics

__all__ = ["Limits", "QueueTimeout", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

_NAME = "limits"
#: Seconds between two lines that say the same.
_AGAIN_S = 60.0


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Limits | None:
    """Return the plugin, or None without a limit. Raises SettingsError."""
    settings = Settings.from_options(options)
    if settings.max_concurrent_requests == -1:
        if settings.refill_per_s:
            logger.warning(
                "--rate-limit-tokens-per-second has no effect: it is for --max-concurrent-requests"
            )
        if settings.queue_policy != Settings().queue_policy:
            logger.warning("--queue-policy has no effect: it is for --max-concurrent-requests")
        return None
    return Limits(settings, settings.max_concurrent_requests)


class QueueTimeout(HTTPError):
    """The request got no slot within ``--queue-timeout-secs``."""

    status, type, code = 408, "request_timeout", "QUEUE_TIMEOUT"


class Limits:
    """Limits generations. Requests that a plugin makes for a generation with a slot need no slot of their own."""

    _router: Router  # set when the router starts to serve

    def __init__(self, settings: Settings, limit: int) -> None:
        self.settings = settings
        queue: Queue[Place] = LongestFirst() if settings.queue_policy == "lof" else FirstCome()
        self.slots = (
            RefilledSlots(limit, settings.queue_size, settings.refill_per_s, anyio.current_time, queue)
            if settings.refill_per_s
            else Slots(limit, settings.queue_size, queue)
        )
        self._is_ranked = settings.queue_policy == "lof"
        self._waiting: dict[Exchange, anyio.Event] = {}
        self._decisions = {"allowed": 0, "rejected": 0}
        self._refill: asyncio.TimerHandle | None = None
        self._waits = Waits()
        self._warned_at: dict[str, float] = {}

    @hookimpl
    def setup(self, router: Router) -> None:
        metrics: Metrics | None = router.components.find("metrics")
        if metrics is not None:
            slots = self.slots
            metrics.gauge("slime_slots", "Slots for generations.", lambda: slots.limit)
            metrics.gauge("slime_slots_held", "Slots that generations hold.", lambda: slots.held)
            metrics.gauge("slime_requests_queued", "Generations that wait for a slot.", lambda: slots.waiting)
            metrics.counter(
                "smg_http_rate_limit_total",
                "Generations that got a slot, and those refused because of the limit.",
                lambda: self._decisions,
                ["result"],
            )

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._router = router
        self._waits = Waits(router.components.find)
        events: ControlEvents | None = router.components.find("control_events")
        if events is not None:
            events.subscribe(self._abort)
        router.tasks.start_soon(self._close, router.stopping)
        yield

    async def _close(self, stopping: anyio.Event) -> None:
        await stopping.wait()
        self.slots.close()

    @hookimpl  # not ``tryfirst``: a plugin with that mark may answer a request before it needs a slot
    async def pre_request(self, exchange: Exchange) -> None:
        parent = exchange.parent
        if parent is not None and _NAME in parent.notes:
            exchange.notes[_NAME] = parent.notes[_NAME]
            return
        path = exchange.request.target.partition(b"?")[0]
        if path not in GENERATION_PATHS:
            return
        if exchange.request.is_long_work:
            # An abort looks for the rid. A queue in another order than that of arrival needs more fields.
            await self._router.read_ahead(exchange, *(() if self._is_ranked else (b"rid",)))
        try:
            place = (
                self.slots.take(partial(_rank, exchange.request)) if self._is_ranked else self.slots.take()
            )
        except QueueFull as error:
            self._decisions["rejected"] += 1
            self._warn("full", f"requests are refused (429): {error}")
            raise
        # From now on, ``place.leave`` is called in any case. So a request that is cancelled just when it gets its slot
        # returns the slot.
        exchange.on_close(place.leave)
        if not place.held:
            await self._turn(place, exchange)
        self._decisions["allowed"] += 1
        exchange.notes[_NAME] = place

    async def _turn(self, place: Place, exchange: Exchange) -> None:
        """Wait until ``place`` has its slot. Raises QueueTimeout, Aborted and ShuttingDown."""
        called = anyio.Event()
        place.call = called.set
        timeout_s = self.settings.queue_timeout_s
        self._warn(
            "waiting", f"requests wait: all {self.slots.limit} slots are in use (--max-concurrent-requests)"
        )
        self._waiting[exchange] = called
        if isinstance(self.slots, RefilledSlots) and self._refill is None:
            self._refill_in_time(self.slots)
        try:
            with anyio.move_on_after(timeout_s), self._waits.during("queue"):
                await called.wait()
        finally:
            del self._waiting[exchange]
        if exchange.client_disconnected:
            raise Aborted("the request was aborted while it waited for a slot")
        if place.held:
            return
        place.leave()
        if self.slots.closed:
            raise ShuttingDown("the router is shutting down")
        self._decisions["rejected"] += 1
        raise QueueTimeout(f"no slot came free within {timeout_s:g} s (--queue-timeout-secs)")

    def _warn(self, what: str, line: str) -> None:
        """Log ``line``, unless ``what`` was logged within the last minute."""
        now = anyio.current_time()
        if now >= self._warned_at.get(what, -_AGAIN_S) + _AGAIN_S:
            self._warned_at[what] = now
            logger.warning("%s", line)

    def _refill_in_time(self, slots: RefilledSlots) -> None:
        """Refill ``slots``. If a request still waits, call this again when the next token is due."""
        slots.refill()
        self._refill = None
        if slots.waiting:
            loop = asyncio.get_running_loop()
            self._refill = loop.call_later(slots.next_s(), self._refill_in_time, slots)

    def _abort(self, prefix: str) -> None:
        """End the wait of each request whose rids all begin with ``prefix``; of all requests if ``prefix`` is empty."""
        for exchange, called in self._waiting.items():
            rid = exchange.request.field("rid")
            names = rid if isinstance(rid, list) and rid else [rid]
            if not prefix or all(isinstance(name, str) and name.startswith(prefix) for name in names):
                exchange.hang_up()
                called.set()


def _rank(request: Request) -> Rank:
    return rank_of(request.json_object_or_none() or {})
