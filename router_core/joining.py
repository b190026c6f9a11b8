"""Workers that have registered, until they answer: what each says of itself when it is first asked."""

from __future__ import annotations

import logging
from typing import Protocol

import anyio
import httpx
import orjson
from anyio.abc import TaskGroup

from router_core.errors import WorkerBroke
from router_core.ranks import ranks_told
from router_core.settings import Settings
from router_core.weights import WeightVersions, version_named
from router_core.workers import Worker, WorkerPool, auth_headers

__all__ = ["Joining", "Recognizer", "Refusal"]

logger = logging.getLogger(__name__)

#: Seconds that registering waits for a worker's first answer.
_FIRST_LOOK_S = 2.0
_MAX_INFO_BYTES = 1 << 20
#: A whole fleet may register in one moment, and what a request costs the HTTP client grows with those that wait in it.
_ASKED_AT_ONCE = 64


class Refusal(str):
    """Trouble with a worker that is final: it was removed."""

    __slots__ = ()


class Recognizer(Protocol):
    """Knows servers that are no engines of ours; the component ``"recognizer"``."""

    async def objection(self, worker: Worker) -> str | None:
        """Why ``worker``, which does not introduce itself, cannot be registered; None when it can."""
        ...


class Joining:
    """Asks workers about themselves, while the router serves. ``by_model``: what each calls its model, too."""

    def __init__(
        self,
        pool: WorkerPool,
        weights: WeightVersions,
        settings: Settings,
        http: httpx.AsyncClient,
        tasks: TaskGroup,
        recognizer: Recognizer | None = None,
        *,
        by_model: bool = False,
    ) -> None:
        self._pool = pool
        self._weights = weights
        self._settings = settings
        self._http = http
        self._tasks = tasks
        self._recognizer = recognizer
        self._by_model = by_model
        self._expected: set[str] = set()
        self._asking = anyio.Semaphore(_ASKED_AT_ONCE)

    def expect(self, worker: Worker, trouble: str) -> None:
        """``worker`` does not answer yet, because of ``trouble``: look at it until it does."""
        _explain(worker, trouble)
        if worker.id not in self._expected:
            self._expected.add(worker.id)
            self._tasks.start_soon(self._wait_for, worker)

    async def _wait_for(self, worker: Worker) -> None:
        settings = self._settings
        until = anyio.current_time() + settings.worker_startup_timeout_s
        try:
            while worker in self._pool and worker.state == "joining":
                if anyio.current_time() >= until:
                    limit = settings.worker_startup_timeout_s
                    self._pool.quarantine(
                        worker, f"it has not answered within {limit:g} s of its registration"
                    )
                    return
                await anyio.sleep(settings.worker_startup_check_s)
                trouble = await self.look_at(worker)
                if trouble is None:
                    return
                _explain(worker, trouble)
        finally:
            self._expected.discard(worker.id)

    async def look_at(self, worker: Worker) -> str | None:
        """Ask ``worker`` about itself; None when it answered, whatever it said, else what was wrong.

        One that is none of ours is removed, and what was wrong is a Refusal. One that is only proxied to has nothing to
        say of itself: whatever it answers will do.
        """
        served = None
        introduces = not worker.passthrough
        try:
            with anyio.fail_after(_FIRST_LOOK_S):  # httpx counts each step of a request by itself
                for path in ("/model_info", "/get_model_info") if introduces else ("/health",):
                    status, body = await self._get(worker, path)
                    if status != 404:
                        break
                if introduces and status < 500 and (self._settings.dp_aware or self._by_model):
                    told = await self._server_info(worker)
                    if self._settings.dp_aware:
                        self._pool.split(worker, ranks_told(told))
                    if self._by_model:
                        served = _served_model(told)
        except TimeoutError:
            return f"no answer within {_FIRST_LOOK_S:g} s"
        except Exception as error:  # httpcore on uvloop lets odd ones through; no worker may end the router
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if status >= 500 and status != 501:  # which knows no GET, and may do all else
            return f"it answered {status}"
        if introduces and status == 404 and (objection := await self._objection(worker)) is not None:
            logger.error("worker %s is refused: %s", worker.url, objection)
            self._pool.remove(worker)
            return Refusal(objection)
        at = self._learn(worker, body) if introduces and status == 200 else None
        if worker.model_id is None:
            worker.model_id, worker.model_told = served or at, True
        elif worker.model_told and served is not None:
            worker.model_id = served  # not ``at``, which is another after each update from disk
        if worker.state == "joining":
            self._pool.ready(worker)
            logger.info("worker %s is ready", worker.url)
        return None

    async def _objection(self, worker: Worker) -> str | None:
        return await self._recognizer.objection(worker) if self._recognizer is not None else None

    async def count_again(self, worker: Worker) -> None:
        """``worker`` is back, perhaps as another process with other ranks."""
        trouble: object = f"no answer within {_FIRST_LOOK_S:g} s"
        with anyio.move_on_after(_FIRST_LOOK_S):
            try:
                self._pool.split(worker, ranks_told(await self._server_info(worker)))
                return
            except Exception as error:  # as above
                trouble = error
        logger.warning("worker %s does not say how many ranks it has: %s", worker.url, trouble)

    async def _server_info(self, worker: Worker) -> bytes:
        for path in ("/server_info", "/get_server_info"):
            status, body = await self._get(worker, path)
            if status == 200:
                return body
            if status >= 500:
                raise WorkerBroke(f"it answered {path} with {status}")
        return b""

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """Status and body; of a body that is too long for what is asked, the beginning."""
        body = bytearray()
        headers = auth_headers(worker)
        async with (
            self._asking,
            self._http.stream("GET", worker.url + path, headers=headers, timeout=_FIRST_LOOK_S) as answer,
        ):
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > _MAX_INFO_BYTES:
                    break
        return answer.status_code, bytes(body)

    def _learn(self, worker: Worker, body: bytes) -> str | None:
        """Take over the version of the weights; returns where its model is."""
        try:
            info = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None  # not an SGLang server; it can be proxied to all the same
        if not isinstance(info, dict):
            return None
        version, model = version_named(info.get("weight_version")), info.get("model_path")
        worker.said_version = version
        if version is not None:
            worker.weight_version = version
            self._weights.see(version)
            if self._weights.current is None:
                self._weights.move(version, worker.url)  # learnt, not changed: no hook
        return model if isinstance(model, str) else None


def _explain(worker: Worker, trouble: str) -> None:
    if worker.state == "joining":
        worker.reason = f"it has not answered yet ({trouble})"


def _served_model(server_info: bytes) -> str | None:
    """What its clients call the model, if it says so."""
    try:
        document = orjson.loads(server_info)
    except orjson.JSONDecodeError:
        return None
    name = document.get("served_model_name") if isinstance(document, dict) else None
    return name if isinstance(name, str) and name else None
