"""Answers for all engines what one engine would answer for itself: loads, metrics, health, server, model, weights."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, TypeVar

import anyio
from anyio import to_thread

from router_core import Reply, Worker
from router_core.errors import HTTPError, NoWorker, WorkerBroke
from router_core.router import Router
from slime_control.calls.fan_out import FanOut, json_in
from slime_control.calls.metrics_text import CONTENT_TYPE, Family, families_in, merged
from slime_sglang.loads import loads_in, tokens_of

__all__ = ["QUESTIONS", "NoAnswer", "NoHealthyEngine", "Overview"]

#: The paths that Overview answers, to GET and HEAD.
QUESTIONS = frozenset(
    (
        "/engine_metrics", "/get_loads", "/get_model_info", "/get_server_info", "/get_weight_version",
        "/health_generate", "/model_info", "/server_info", "/v1/loads",
    )
)  # fmt: skip
#: States of the workers that are asked. The other workers are listed without an answer.
_ASKED = ("ready", "stale", "draining")
_AT_ONCE = 32
#: Seconds to wait for an engine's health check. SGLang generates for up to 20 s in its health check.
_HEALTH_S = 25.0
_HEALTH_AT_ONCE = 8
#: Longest time in seconds until one more engine is asked, if no engine fails meanwhile.
_HEALTH_PATIENCE_S = 1.0
#: Seconds to wait for an engine's metrics: less than the usual timeout of a scraper.
_METRICS_S = 4.0
_METRICS_BYTES = 4 << 20
_METRICS_TOTAL_BYTES = 64 << 20
#: Settings of a worker whose values are not shown.
_SECRETS = ("admin_api_key", "api_key", "ssl_keyfile_password")

Found = TypeVar("Found")


class NoAnswer(HTTPError):
    """No engine answered the question."""

    status: int = 502
    type: ClassVar[str] = "bad_gateway"
    code: ClassVar[str] = "NO_ANSWER"


class NoHealthyEngine(HTTPError):
    """No engine of a type that requests need can generate a token now."""

    status: int = 503
    type: ClassVar[str] = "service_unavailable"
    code: ClassVar[str] = "NO_HEALTHY_ENGINE"


class Overview:
    """Asks many workers a question at once, and lists the workers that gave no answer."""

    def __init__(self, router: Router, fan_out: FanOut) -> None:
        self._router = router
        self._fan_out = fan_out

    async def answer(self, path: str) -> Reply:
        """Return the answer to a GET of ``path``, one of QUESTIONS. Raises HTTPError."""
        match path:
            case "/get_loads" | "/v1/loads":
                return await self._loads()
            case "/engine_metrics":
                return await self._engine_metrics()
            case "/health_generate":
                return await self._health_generate()
            case "/server_info" | "/get_server_info":
                return await self._about("/server_info", "/get_server_info")
            case "/model_info" | "/get_model_info":
                return await self._about("/model_info", "/get_model_info")
        return self._weight_version()

    async def _each(
        self, ask: Callable[[Worker], Awaitable[Found]]
    ) -> tuple[dict[Worker, Found], dict[Worker, str]]:
        """Ask the workers in a state of ``_ASKED``. Return the answers, and a reason for each worker without an answer.

        Answers and reasons are in the order of registration.
        """
        answers: dict[Worker, Found] = {}
        troubles: dict[Worker, str] = {}
        limit = anyio.CapacityLimiter(_AT_ONCE)

        async def one(worker: Worker) -> None:
            async with limit:
                try:
                    answers[worker] = await ask(worker)
                except HTTPError as error:
                    troubles[worker] = str(error)

        workers = list(self._router.pool)
        async with anyio.create_task_group() as tasks:
            for worker in workers:
                if worker.state in _ASKED:
                    tasks.start_soon(one, worker)
                else:
                    troubles[worker] = f"it is {worker.state}, and was not asked"
        return (
            {worker: answers[worker] for worker in workers if worker in answers},
            {worker: troubles[worker] for worker in workers if worker in troubles},
        )

    def _expect_workers(self) -> None:
        if not len(self._router.pool):
            raise NoWorker("no worker is registered")

    # Loads: the SGLang gateway's list by worker, and the engines' own list by rank.

    async def _loads(self) -> Reply:
        async def ask(worker: Worker) -> tuple[int, list[dict[str, Any]]]:
            raw = await self._fan_out.fetch(worker, "/v1/loads?include=core", "/get_load")
            loads = loads_in(json_in(raw))
            return tokens_of(loads), loads

        found, troubles = await self._each(ask)
        workers: list[dict[str, Any]] = []
        for worker in (*found, *troubles):
            if worker in found:
                workers.append({"worker": worker.url, "load": found[worker][0]})
            else:
                workers.append({"worker": worker.url, "load": -1, "error": troubles[worker]})
        loads = [{**load, "worker": worker.url} for worker, (_, each) in found.items() for load in each]
        return Reply.from_json({"workers": workers, "loads": loads})

    # Metrics.

    async def _engine_metrics(self) -> Reply:
        self._expect_workers()
        taken = 0

        async def ask(worker: Worker) -> dict[bytes, Family]:
            nonlocal taken
            raw = await self._fan_out.fetch(
                worker, "/metrics", timeout_s=_METRICS_S, max_bytes=_METRICS_BYTES
            )
            if taken + len(raw) > _METRICS_TOTAL_BYTES:
                raise WorkerBroke(f"the metrics of all workers are larger than {_METRICS_TOTAL_BYTES} bytes")
            taken += len(raw)
            try:
                # Parsing takes milliseconds, so a thread does it: requests go on meanwhile.
                return await to_thread.run_sync(families_in, raw, worker.url)
            except ValueError as error:
                raise WorkerBroke(f"its metrics cannot be read: {error}") from None

        found, troubles = await self._each(ask)
        if not found:
            raise NoAnswer(f"no worker gave its metrics (SGLang: --enable-metrics): {_listed(troubles)}")
        notes = [f"left out: {worker.url}: {trouble}" for worker, trouble in troubles.items()]
        text = await to_thread.run_sync(merged, found.values(), notes)
        return Reply(200, [(b"content-type", CONTENT_TYPE)], text)

    # Health.

    async def _health_generate(self) -> Reply:
        """Find one worker of each needed kind that can generate a token now. Raises HTTPError."""
        self._expect_workers()
        pool = self._router.pool
        if pool.missing is not None:
            raise NoHealthyEngine(f"no worker can be used: {pool.standings()}")
        servers = dict.fromkeys(worker.server for worker in pool.routable())
        kinds = groupby(servers, lambda worker: worker.kind)
        healthy = [await self._first_healthy(list(workers)) for _, workers in kinds]
        return Reply.from_json({"status": "ok", "workers": healthy})

    async def _first_healthy(self, workers: Sequence[Worker]) -> str:
        """Return the URL of the first worker that answers with success. Raises NoHealthyEngine.

        Each worker that is asked generates a token. So only eight workers are asked at first, and one more each time
        that a worker has failed. A hung worker does not fail in time. So one more worker is also asked each second.
        With more than 25 workers, the interval is shorter, so that all of them are asked before the deadline.
        """
        troubles = dict.fromkeys(workers, "it was not asked in time")
        healthy: list[str] = []
        turns = anyio.Semaphore(_HEALTH_AT_ONCE)

        async def ask(worker: Worker) -> None:
            troubles[worker] = "no answer in time"
            try:
                await self._fan_out.fetch(worker, "/health_generate", timeout_s=_HEALTH_S)
            except HTTPError as error:
                troubles[worker] = str(error)
                turns.release()
            else:
                healthy.append(worker.url)
                tasks.cancel_scope.cancel()

        with anyio.move_on_after(_HEALTH_S):
            async with anyio.create_task_group() as tasks:
                for worker in random.sample(workers, len(workers)):
                    with anyio.move_on_after(min(_HEALTH_PATIENCE_S, _HEALTH_S / len(workers))):
                        await turns.acquire()
                    tasks.start_soon(ask, worker)
        if healthy:
            return healthy[0]
        raise NoHealthyEngine(
            f"no worker answered /health_generate with success within {_HEALTH_S:g} s: {_listed(troubles)}"
        )

    # Engines about themselves.

    async def _about(self, *paths: str) -> Reply:
        """Return each worker's document.

        The document of one worker is also at the top level, for clients that expect one engine. This worker is the
        first healthy worker that answered, in the order of registration; else the first worker that answered.
        """
        self._expect_workers()
        found, troubles = await self._each(partial(self._document, paths))
        if not found:
            raise NoAnswer(f"no worker answered {paths[0]}: {_listed(troubles)}")
        router = self._router
        told = {worker.url: document for worker, document in found.items()}
        told |= {worker.url: {"error": trouble} for worker, trouble in troubles.items()}
        first = min(found, key=lambda worker: not worker.is_healthy)  # the first healthy one, if any
        content = {
            **found[first],
            "workers": told,
            "healthy_workers": router.pool.healthy,
            "total_workers": len(router.pool),
        }
        if router.weights.current is not None and router.weights.differ() is None:
            content["weight_version"] = router.weights.current
        return Reply.from_json(content)

    async def _document(self, paths: Sequence[str], worker: Worker) -> dict[str, Any]:
        document = json_in(await self._fan_out.fetch(worker, *paths))
        if not isinstance(document, dict):
            raise WorkerBroke(f"its answer to {paths[0]} is no JSON object")
        return document | {name: None for name in _SECRETS if name in document}

    def _weight_version(self) -> Reply:
        versions = {worker.url: worker.weight_version for worker in self._router.pool}
        return Reply.from_json({"weight_version": self._router.weights.current, "workers": versions})


def _listed(troubles: dict[Worker, str]) -> str:
    """Return the first twenty ``troubles`` as text."""
    told = [f"{worker.url}: {trouble}" for worker, trouble in [*troubles.items()][:20]]
    more = len(troubles) - len(told)
    return "; ".join([*told, f"and {more} more"] if more else told)
