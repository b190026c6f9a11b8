"""Loads that engines report, polled in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import anyio
import orjson

from router_core import Exchange, HTTPError, Reply, Worker
from router_core.errors import WorkerBroke
from router_core.router import Router
from slime_http.limits import Limits
from slime_http.upstream import Upstream
from slime_policies.tokens_in_flight import CountedRequest, TokensInFlight, change_total
from slime_sglang.facts import dp_rank
from slime_sglang.loads import loads_in, tokens_of

__all__ = ["EngineLoads"]

logger = logging.getLogger(__name__)

_PATHS = (b"/v1/loads?include=core", b"/get_load")
#: A poll takes this long at most, and no longer than the interval of the polls.
_TIMEOUT_S = 1.0
#: A load that was polled longer ago than this many intervals is unknown.
_INTERVALS = 3
_MAX_BYTES = 1 << 20


class EngineLoads(TokensInFlight):
    """The tokens that each engine reported last, plus those of the requests that were sent to it since then.

    The load of a worker is unknown if its last poll failed, or is older than three intervals. Such a load is estimated:
    the worker's requests in flight times the mean load of a request at workers with a known load. Each of the two
    factors is at least 1, so the worker never counts as idle. If no load is known, all loads are requests in flight.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._interval_s = interval_s
        self._paths: dict[str, bytes] = {}
        #: By the ids of workers and ranks: the time when the last poll was sent, and the tokens in its answer.
        #: A failed poll removes both.
        self._polled: dict[str, tuple[float, int]] = {}
        #: The unfinished requests that were sent since the last successful poll, and the sums of their tokens.
        self._sent: dict[str, set[CountedRequest]] = {}
        self._since: dict[str, int] = {}

    def loads(self, workers: Sequence[Worker]) -> list[float]:
        """See :meth:`TokensInFlight.loads`."""
        found = [self._known(worker) for worker in workers]
        known = [load for load in found if load is not None]
        if not known:
            return [worker.in_flight for worker in workers]
        requests = sum(
            worker.in_flight for worker, load in zip(workers, found, strict=True) if load is not None
        )
        each = max(1.0, sum(known) / max(1, requests))
        return [
            max(1, worker.in_flight) * each if load is None else load
            for worker, load in zip(workers, found, strict=True)
        ]

    def _known(self, worker: Worker) -> int | None:
        """Return the load of ``worker``, at least its requests in flight; None if the load is unknown."""
        polled_at, tokens = self._polled.get(worker.id, (-inf, 0))
        if self.clock() - polled_at > _INTERVALS * self._interval_s:
            return None
        return max(worker.in_flight, tokens + self._since.get(worker.id, 0))

    def set_polled(self, worker: Worker, tokens: int | None, sent_at: float) -> None:
        """Set the tokens that ``worker`` reported to the poll of ``sent_at``, or forget them if ``tokens`` is None.

        ``tokens`` is None if the poll failed.
        """
        if tokens is None:
            self._polled.pop(worker.id, None)
            return
        self._polled[worker.id] = sent_at, tokens
        for request in [each for each in self._sent.get(worker.id, ()) if each.at < sent_at]:
            self._drop(request)

    def _add(self, request: CountedRequest) -> None:
        super()._add(request)
        self._sent.setdefault(request.worker.id, set()).add(request)
        change_total(self._since, request.worker.id, _size(request))

    def _remove(self, request: CountedRequest) -> None:
        super()._remove(request)
        self._drop(request)

    def _drop(self, request: CountedRequest) -> None:
        name = request.worker.id
        sent = self._sent.get(name, set())
        if request in sent:
            sent.remove(request)
            change_total(self._since, name, -_size(request))
            if not sent:
                del self._sent[name]

    def begin(self, exchange: Exchange) -> None:
        """Do nothing: a prompt counts until the next successful poll, even after the engine has prefilled it."""

    async def poll(self, router: Router, kind: str) -> None:
        """Poll the engines of type ``kind`` until cancelled."""
        while True:
            workers = [each for each in router.pool if each.kind == kind and not each.passthrough]
            self._forget_others(workers)
            async with anyio.create_task_group() as tasks:
                for worker in workers:
                    tasks.start_soon(self._ask, router, worker)
            await anyio.sleep(self._interval_s)

    def _forget_others(self, workers: Iterable[Worker]) -> None:
        names = {choice.id for worker in workers for choice in worker.choices}
        self._polled = {name: polled for name, polled in self._polled.items() if name in names}
        self._paths = {name: path for name, path in self._paths.items() if name in names}

    async def _ask(self, router: Router, worker: Worker) -> None:
        sent_at = self.clock()
        found: list[int | None] = [None] * len(worker.choices)
        path = self._paths.setdefault(worker.id, _PATHS[0])
        try:
            with anyio.fail_after(min(_TIMEOUT_S, self._interval_s)):
                status, body = await _get(router, worker, path)
            if status == 404:  # the next poll asks at the other path
                self._paths[worker.id] = _PATHS[1 - _PATHS.index(path)]
            elif status == 200:
                loads = loads_in(orjson.loads(body))
                found = [_tokens_in(loads, choice) for choice in worker.choices]
        except (HTTPError, TimeoutError, ValueError) as error:
            logger.debug("the load of %s is unknown: %s: %s", worker.url, type(error).__name__, error)
        except Exception:  # a worker's fault must not end the router
            logger.warning("the load of %s cannot be polled", worker.url, exc_info=True)
        for choice, tokens in zip(worker.choices, found, strict=False):  # ranks may have changed meanwhile
            self.set_polled(choice, tokens, sent_at)


async def _get(router: Router, worker: Worker, path: bytes) -> tuple[int, bytes]:
    """Return the status and the body. Raises HTTPError.

    Each poll has its own connection: an answer on the proxy's connections would count as a sign of health.
    """
    # The caller's deadline is exact; these limits are checked only once a second.
    limits = Limits(connect_s=2 * _TIMEOUT_S, first_byte_s=2 * _TIMEOUT_S, silence_s=2 * _TIMEOUT_S)
    reachable, key = router.addresses.reachable, worker.api_key
    upstream = Upstream(worker.url, limits, router.worker_tls, api_key=key, reachable=reachable)
    try:
        answer = await upstream.request("GET", path, [])
        reply = Reply(answer.status, answer.headers, answer)
        return reply.status, await reply.read(_MAX_BYTES)
    finally:
        upstream.close()


def _tokens_in(loads: list[dict[str, Any]], choice: Worker) -> int | None:
    """Return the tokens of ``choice``, a worker or a rank; None if the number is missing or invalid."""
    rank = dp_rank(choice)
    own = loads if rank is None else [each for each in loads if each.get("dp_rank") == rank]
    try:
        return tokens if own and (tokens := tokens_of(own)) >= 0 else None
    except WorkerBroke:
        return None


def _size(request: CountedRequest) -> int:
    return request.prompt + request.answer
