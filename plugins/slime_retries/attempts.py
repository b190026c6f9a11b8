"""Retries: which requests may be sent again, after which delay, and to which workers."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import anyio
from tenacity import AsyncRetrying, RetryCallState, stop_after_attempt, wait_exponential

from router_core import Exchange, Worker
from router_core.errors import Aborted, HTTPError, NoWorker, WorkerBroke, WorkerUnreachable
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from slime_logging.waits import Waits
from slime_retries.settings import Settings
from slime_sglang.generation import GENERATION_PATHS

__all__ = ["TEMPORARY", "Ask", "Attempts", "Tally", "changes_nothing"]

logger = logging.getLogger(__name__)

#: Statuses after which another worker, or the same worker a little later, may succeed.
TEMPORARY = frozenset((408, 429, 500, 502, 503, 504))

#: Paths at which a POST changes nothing in an engine.
_PURE = GENERATION_PATHS | frozenset(
    (
        b"/classify", b"/detokenize", b"/encode", b"/tokenize", b"/v1/classify", b"/v1/detokenize", b"/v1/embeddings",
        b"/v1/rerank", b"/v1/score", b"/v1/tokenize",
    )
)  # fmt: skip

#: Key of the note of an exchange that has exhausted its attempts.
_NOTE = "retries"

#: Makes one attempt. The first collection: workers to avoid. The second: workers that have failed the request.
Ask = Callable[[Exchange, Request, Collection[Worker], Collection[Worker]], Awaitable[Reply]]


@dataclass(slots=True)
class Tally:
    """Counts over all requests. ``retries``: attempts after the first.

    ``exhausted``: requests whose last allowed attempt failed in a way that permits a retry.
    """

    retries: int = 0
    exhausted: int = 0


class Attempts:
    """The attempts of one request. Between attempts no lease and no reply is held.

    ``outcome``: the outcome of the first attempt.
    """

    def __init__(
        self,
        settings: Settings,
        pool: WorkerPool,
        ask: Ask,
        exchange: Exchange,
        request: Request,
        outcome: Reply | HTTPError,
        tally: Tally,
        waits: Waits,
    ) -> None:
        self._settings = settings
        self._tally = tally
        self._waits = waits
        self._pool = pool
        self._ask = ask
        self._exchange = exchange
        self._request = request
        self._first: Reply | HTTPError | None = outcome
        self._tried: list[Worker] = []
        self._failed: set[Worker] = set()
        self._backoff = wait_exponential(
            multiplier=settings.initial_backoff_ms / 1000,
            exp_base=settings.backoff_multiplier,
            max=settings.max_backoff_ms / 1000,
        )

    async def run(self) -> Reply:
        """Return the first reply that is not retried, else the last reply. Raises HTTPError.

        A plugin may send a request again after its attempts were exhausted. The request then gets a single attempt,
        whose outcome is the result.
        """
        notes = self._exchange.notes

        def exhausted(state: RetryCallState) -> Reply:
            notes[_NOTE] = "exhausted"
            self._tally.exhausted += 1
            return _reply(state)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(
                1 if self._settings.disabled or _NOTE in notes else self._settings.attempts
            ),
            wait=self._wait_s,
            retry=self._may_repeat,
            before_sleep=self._let_go,
            retry_error_callback=exhausted,
            sleep=self._sleep,
        )
        reply: Reply = await retrying(self._attempt)
        return reply

    async def _attempt(self) -> Reply:
        first, self._first = self._first, None
        if isinstance(first, HTTPError):
            raise first
        if first is not None:
            return first
        if self._exchange.client_disconnected:
            raise Aborted("the request was aborted before it was tried again")
        if not self._others():
            del self._tried[:-1]  # all have failed: try any again, but no worker twice in a row
            if not self._others():
                self._tried.clear()
        return await self._ask(self._exchange, self._request, self._tried, self._failed)

    def _others(self) -> bool:
        """Return True when an untried worker, of the type that failed last, can take the request."""
        try:
            workers = self._pool.routable()
        except NoWorker:
            return False
        last = self._exchange.worker
        tried = self._tried if last is None else [*self._tried, last.server]
        return any(
            worker.server not in tried
            and (not tried or worker.server.worker_type == tried[-1].worker_type)
            and self._exchange.may_go_to(worker.server)
            for worker in workers
        )

    def _may_repeat(self, state: RetryCallState) -> bool:
        if self._exchange.client_disconnected:
            return False
        error = _error(state)
        if isinstance(error, WorkerUnreachable | NoWorker):
            return True  # no worker got the request
        passing = _reply(state).status in TEMPORARY if error is None else isinstance(error, WorkerBroke)
        return passing and changes_nothing(self._request)

    def _wait_s(self, state: RetryCallState) -> float:
        settings = self._settings
        wait_s = self._backoff(state) * random.uniform(1 - settings.jitter, 1 + settings.jitter)
        if _error(state) is None and not self._others():
            wait_s = max(wait_s, _retry_after_s(_reply(state)))
        return min(wait_s, settings.max_backoff_ms / 1000)

    async def _sleep(self, seconds: float) -> None:
        with self._waits.during("retry"):
            await anyio.sleep(seconds)

    def _let_go(self, state: RetryCallState) -> None:
        exchange, error = self._exchange, _error(state)
        self._tally.retries += 1
        logger.debug("attempt %d failed: %s", state.attempt_number, error or _reply(state).status)
        if exchange.worker is not None:
            self._tried.append(exchange.worker.server)
            self._failed.add(exchange.worker.server)
            exchange.release()
        if error is None:
            _reply(state).close()


def changes_nothing(request: Request) -> bool:
    """Return True when ``request`` may be sent again even if a worker has acted on it."""
    if request.method == "POST":
        return request.target.partition(b"?")[0] in _PURE
    return request.method in ("GET", "HEAD")


def _error(state: RetryCallState) -> BaseException | None:
    assert state.outcome is not None  # narrowing: the attempt has ended
    return state.outcome.exception()


def _reply(state: RetryCallState) -> Reply:
    """Return the reply of the attempt that has ended, or raise its error."""
    assert state.outcome is not None  # narrowing: the attempt has ended
    reply: Reply = state.outcome.result()
    return reply


def _retry_after_s(reply: Reply) -> float:
    """Return the seconds of a reply's ``Retry-After``, else 0. A date (RFC 9110 section 10.2.3) is ignored."""
    value = reply.header(b"retry-after")
    return float(value) if value is not None and value.isdigit() else 0.0
