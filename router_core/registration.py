"""Registers workers, asks them about themselves until they answer, and drains them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import anyio
import httpx
from anyio.abc import TaskGroup

from router_core.errors import MixedWorkers
from router_core.pool import WorkerPool
from router_core.settings import Settings
from router_core.workers import DRAINING, JOINING, Worker, WorkerType, auth_headers, worker_url

__all__ = ["FIRST_LOOK_S", "Introduction", "Refusal", "Registration", "get", "unwell"]

logger = logging.getLogger(__name__)

#: Seconds between two checks of a draining worker.
_DRAINED_S = 0.05
#: Deadline in seconds for a worker's answer about itself.
FIRST_LOOK_S = 2.0
_MAX_INFO_BYTES = 1 << 20
#: Largest number of requests at once. A whole fleet may register together, and many waiting requests slow httpx down.
_ASKED_AT_ONCE = 64


class Refusal(str):
    """The reason why a server cannot be a worker; the router removes such a server."""

    __slots__ = ()


class Introduction(Protocol):
    """Asks workers about themselves; a plugin registers it as the component ``"introduction"``."""

    async def ask(self, worker: Worker) -> str | None:
        """Ask ``worker`` about itself, and keep its answer. Return None when it answered, else the problem.

        A Refusal means that the server cannot be a worker. An exception counts as a problem, too. An
        implementation keeps to the deadline :data:`FIRST_LOOK_S`. Not called for passthrough workers.
        """
        ...


class Registration:
    """Registers workers and waits until they answer. Without an ``introduction`` it only requests ``/health``."""

    def __init__(
        self,
        pool: WorkerPool,
        settings: Settings,
        http: httpx.AsyncClient,
        tasks: TaskGroup,
        introduction: Introduction | None = None,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._http = http
        self._tasks = tasks
        self._introduction = introduction
        self._expected: dict[str, float] = {}  # deadlines, by worker id
        self._asking = anyio.Semaphore(_ASKED_AT_ONCE)

    async def add(
        self,
        url: str,
        *,
        worker_type: WorkerType | None = None,
        facts: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        api_key: str | None = None,
    ) -> tuple[Worker, str | None]:
        """Register a worker, or update a registered worker, see :meth:`WorkerPool.add`.

        Without a ``worker_type`` a registered worker keeps its type. Returns the worker, and None if it answered, else
        the problem (a Refusal if it cannot be a worker). A worker that was not ``ready`` before and does not answer is
        ``joining``, later ``quarantined``, and the router asks it again. Raises BadRequest and MixedWorkers.
        """
        url = worker_url(url)
        known = next((worker for worker in self._pool if worker.url == url), None)
        if known is not None and worker_type is None:
            worker_type = known.worker_type
        worker = self._pool.add(
            Worker(url, worker_type or "regular", facts or {}, labels or {}, api_key=api_key)
        )
        trouble = await self.look_at(worker)
        if trouble is not None and worker in self._pool:
            logger.warning("worker %s is not ready yet: %s", worker.url, trouble)
            self._expect(worker, trouble)
        return worker, trouble

    async def add_first(self, workers: Mapping[str, dict[str, Any]]) -> None:
        """Register the ``workers`` that a router starts with, by URL; returns when each was asked once.

        Workers that a plugin has restored are registered already, and left out.
        """
        known = {worker.url for worker in self._pool}
        async with anyio.create_task_group() as first:
            for url, about in workers.items():
                if url not in known:
                    first.start_soon(self._add_first, url, about)

    async def _add_first(self, url: str, about: dict[str, Any]) -> None:
        try:
            await self.add(url, **about)
        except MixedWorkers as error:  # restored workers are of another type
            logger.error("worker %s is not registered: %s", url, error)

    def drain(self, worker: Worker) -> None:
        """Send no new requests to ``worker``, and remove it when its requests in flight have ended."""
        worker = worker.server
        self._pool.hold(worker, DRAINING, "it is removed when its requests in flight have ended", "draining")
        self._tasks.start_soon(self._leave_when_idle, worker)

    async def _leave_when_idle(self, worker: Worker) -> None:
        while worker in self._pool and DRAINING in worker.holds:
            if not worker.load:
                self._pool.remove(worker, "its requests in flight have ended")
            else:
                await anyio.sleep(_DRAINED_S)

    def _expect(self, worker: Worker, trouble: str) -> None:
        """Ask ``worker`` again until it answers; ``trouble`` is the reason why it is not ready."""
        self._explain(worker, trouble)
        is_awaited = worker.id in self._expected
        self._expected[worker.id] = anyio.current_time() + self._settings.worker_startup_timeout_s
        if not is_awaited:
            self._tasks.start_soon(self._wait_for, worker)

    async def _wait_for(self, worker: Worker) -> None:
        settings = self._settings
        limit_s = settings.worker_startup_timeout_s
        try:
            while worker in self._pool and JOINING in worker.holds:
                if anyio.current_time() >= self._expected[worker.id]:
                    reason = f"it was not ready within {limit_s:g} s of its registration"
                    self._pool.hold(worker, JOINING, reason, "quarantined")
                await anyio.sleep(settings.worker_startup_check_s)
                trouble = await self.look_at(worker)
                if trouble is None:
                    return
                self._explain(worker, trouble)
        finally:
            del self._expected[worker.id]

    def _explain(self, worker: Worker, trouble: str) -> None:
        if JOINING in worker.holds and worker.state == "joining":
            self._pool.hold(worker, JOINING, f"it is not ready yet ({trouble})", "joining")

    async def look_at(self, worker: Worker) -> str | None:
        """Ask ``worker`` about itself. Return None when it answered, else the problem.

        A server that cannot be a worker is removed, and the problem is a Refusal. A passthrough worker is not asked
        about itself: it only gets a request for ``/health``, as all workers do without an ``introduction``.
        """
        introduction = None if worker.passthrough else self._introduction
        try:
            trouble = await (self._any_answer(worker) if introduction is None else introduction.ask(worker))
        except TimeoutError:
            return f"no answer within {FIRST_LOOK_S:g} s"
        except Exception as error:  # httpcore on uvloop raises any type, and none may end the router
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(trouble, Refusal):
            logger.error("worker %s is refused: %s", worker.url, trouble)
            self._pool.remove(worker, "it is refused")
        elif trouble is None and JOINING in worker.holds:
            self._pool.release(worker, JOINING)
            logger.info("worker %s is ready", worker.url)
        return trouble

    async def _any_answer(self, worker: Worker) -> str | None:
        with anyio.fail_after(FIRST_LOOK_S):  # httpx applies its timeout to each step of a request
            status, _ = await self.get(worker, "/health")
        return unwell(status)

    async def get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """Call the function :func:`get`; at most 64 of these calls run at once."""
        async with self._asking:
            return await get(self._http, worker, path)


async def get(http: httpx.AsyncClient, worker: Worker, path: str) -> tuple[int, bytes]:
    """Send ``GET path`` to ``worker``, and return status and body. Reading stops once the body exceeds 1 MiB."""
    body = bytearray()
    headers = auth_headers(worker)
    async with http.stream("GET", worker.url + path, headers=headers, timeout=FIRST_LOOK_S) as answer:
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > _MAX_INFO_BYTES:
                break
    return answer.status_code, bytes(body)


def unwell(status: int) -> str | None:
    """Return the problem that ``status`` shows, or None."""
    if status >= 500 and status != 501:  # 501: it serves no GET, but perhaps other methods
        return f"it answered {status}"
    return None
