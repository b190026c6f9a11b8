"""Questions to workers about their weight version, such as after an answer that names an unexpected version."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio

from router_core import Exchange, HTTPError, Worker
from router_core.reply import Reply
from router_core.router import Router
from slime_health.answers import NamedVersion, named_in
from slime_health.probe import Probe
from slime_health.watch import JUDGED, Watch, standing

__all__ = ["ANSWERS", "PROBES", "Heard", "Questions"]

logger = logging.getLogger(__name__)

#: Sources of news, for ``WeightUpdate.source``. News is a change of the version that a worker names.
PROBES, ANSWERS = "the workers", "the workers' answers"
#: Shortest time in seconds between two questions to a worker, when the first question brought no news.
_AGAIN_S = 0.25

#: Called with a worker's watch, the version that it reports, and the source of the question; returns True for news.
Heard = Callable[[Watch, str | None, str], Awaitable[bool]]


class Questions:
    """Asks workers which weights they have, when there is a reason to ask.

    The version in an answer to a client may be old, so it is only a reason to ask the worker. At most one
    question to a worker is under way. ``turn_s`` returns the seconds to wait before the next question to any worker.
    """

    def __init__(
        self, timeout_s: float, watches: Mapping[Worker, Watch], turn_s: Callable[[], float], heard: Heard
    ) -> None:
        self._timeout_s = timeout_s
        self._watches = watches
        self._turn_s = turn_s
        self._heard = heard
        self.router: Router | None = None

    def listen(self, watch: Watch, exchange: Exchange, reply: Reply) -> None:
        """Note the version that ``reply`` names. Costs 1 us, and 0.1 to 0.3 us for each 1,000 bytes."""
        body = reply.body
        if body is None:
            reply.tap(NamedVersion(partial(self._named, watch, exchange), watch.expected))
        elif (version := named_in(body, watch.expected)) is not None:
            self._named(watch, exchange, version)

    def _named(self, watch: Watch, exchange: Exchange, version: str) -> None:
        if exchange.worker is not None:  # another worker may have continued the answer
            watch = self._watches.get(exchange.worker.server, watch)
        if version != watch.worker.said_version:
            watch.claim = version
            self.ask(watch, ANSWERS)

    def ask(self, watch: Watch, source: str = PROBES) -> None:
        """Ask a worker for its weight version soon; ``source`` gave the reason."""
        watch.doubted = source
        if self.router is not None and not watch.is_asked:
            watch.is_asked = True
            self.router.tasks.start_soon(self._ask, self.router, watch)

    async def _ask(self, router: Router, watch: Watch) -> None:
        try:
            while watch.doubted is not None and watch.worker in router.pool:
                await anyio.sleep(self._turn_s())
                source, watch.doubted = watch.doubted, None
                if watch.worker.state in JUDGED and not await self._asked(router, watch, source):
                    await anyio.sleep(_AGAIN_S)
        finally:
            watch.is_asked = False

    async def _asked(self, router: Router, watch: Watch, source: str) -> bool:
        """Ask the worker. Returns True for news, or when the worker must be asked again."""
        worker, judge = watch.worker, watch.judge
        before = standing(router, worker)
        try:
            with Probe(router, worker, self._timeout_s) as probe:
                said = await probe.weight_version()
        except HTTPError as error:
            logger.debug("worker %s does not say which weights it has: %s", worker.url, error)
            watch.woken.set()
            return False
        if watch.judge is not judge or standing(router, worker) != before:
            watch.doubted = source  # the answer may be older than what is known now
            return True
        return await self._heard(watch, said, source)
