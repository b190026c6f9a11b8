"""The Router: the one object that all state hangs on."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
import pluggy
from anyio.abc import TaskGroup, TaskStatus

from router_core.access import auth_headers
from router_core.addresses import CheckedTransport
from router_core.client import Watch
from router_core.errors import BadRequest
from router_core.exchange import Exchange
from router_core.hooks import Hooks, a_reply, failure
from router_core.hookspecs import WorkerChange
from router_core.proxy import Proxy
from router_core.ranks import Ranks, ranks_told
from router_core.registry import ComponentRegistry
from router_core.reply import Reply
from router_core.request import Request
from router_core.settings import Settings
from router_core.types import Dispatcher
from router_core.upstream import Limits
from router_core.weights import WeightUpdate, WeightVersions, version_named
from router_core.workers import Worker, WorkerPool, WorkerType, worker_url

__all__ = ["Router"]

logger = logging.getLogger(__name__)

#: Seconds that registering waits for a worker's first answer, and between looks at one that is to leave.
_FIRST_LOOK_S = 2.0
_DRAINED_S = 0.05
_MAX_INFO_BYTES = 1 << 20


class Router:
    """Everything one router knows. Many may live in one process.

    ``options`` is the parsed command line with the plugins' flags (``args`` is slime's name for it).
    """

    def __init__(
        self, settings: Settings, plugins: pluggy.PluginManager, options: argparse.Namespace | None = None
    ) -> None:
        self.settings = settings
        self.options = options if options is not None else argparse.Namespace()
        self.components = ComponentRegistry()
        self.weights = WeightVersions()
        self.hooks = Hooks(plugins)
        self.pool = WorkerPool(self._worker_changed)
        self.worker_tls = settings.worker_tls()
        limits = Limits(
            connect_s=settings.connect_timeout_s,
            first_byte_s=settings.first_byte_timeout_s,
            silence_s=settings.silence_timeout_s,
        )
        on_failure = self.hooks.call_attempt_failed
        self.proxy = Proxy(
            self.pool, self.hooks.select_worker, limits, self.worker_tls, on_failure, settings.addresses
        )
        self.dispatcher: Dispatcher = Ranks(self.proxy) if settings.dp_aware else self.proxy
        #: Workers to start with, by URL, and what :meth:`add_worker` is to be told of them.
        self.first_workers: dict[str, dict[str, Any]] = {url: {} for url in settings.worker_urls}
        #: Workers are told apart by their models: set by a plugin that lets no request go to another than it names.
        self.by_model = False
        self._clients: Watch | None = None
        self._started: anyio.Event | None = None
        self._stopping: anyio.Event | None = None
        self._tasks: TaskGroup | None = None
        self._http: httpx.AsyncClient | None = None
        self._announcing: anyio.Lock | None = None
        self._expected: set[str] = set()
        for _, setup in self.hooks.setup:
            setup(self)

    @property
    def args(self) -> argparse.Namespace:
        """``options`` under the name that slime's middleware expects."""
        return self.options

    @property
    def clients(self) -> Watch:
        """Notices clients that hang up."""
        assert self._clients is not None, "the router is not serving"
        return self._clients

    @property
    def started(self) -> anyio.Event:
        """Set when all lifespans are entered: a plugin that remembers workers has them again."""
        assert self._started is not None, "the router is not serving"
        return self._started

    @property
    def stopping(self) -> anyio.Event:
        """Set when the router was told to end: who waits for a place or for a pause to end waits no longer."""
        assert self._stopping is not None, "the router is not serving"
        return self._stopping

    def stop(self) -> None:
        """The router was told to end, and finishes what is in flight."""
        if self._stopping is not None:
            self._stopping.set()

    def _hung_up(self, exchange: Exchange) -> bool:
        """The client of ``exchange`` has gone; true when all the workers that it is with were told."""
        told = [self.hooks.client_gone(each) for each in exchange.hang_up()]
        return bool(told) and all(told)

    @property
    def tasks(self) -> TaskGroup:
        """The task group for background work, open while the router serves."""
        assert self._tasks is not None, (
            "the router is not serving: start background work in the lifespan hook"
        )
        return self._tasks

    @property
    def http(self) -> httpx.AsyncClient:
        """A client for what is rare: probes and control. It ignores the environment's proxies; set a timeout."""
        assert self._http is not None, "the router is not serving"
        return self._http

    def worker_transport(self, **options: Any) -> httpx.AsyncBaseTransport:
        """For an httpx client of workers: checks who they are, and shows who we are. ``options`` are httpx's.

        Send :func:`router_core.access.auth_headers` along.
        """
        return CheckedTransport(self.settings.addresses, verify=self.worker_tls, **options)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The router's life: task group, probes' client, the plugins' lifespans; all ended on leaving.

        Background work ends before the lifespans do, whose resources it uses; when it crashes, so does the router.
        """
        try:
            async with (
                httpx.AsyncClient(trust_env=False, transport=self.worker_transport()) as self._http,
                anyio.create_task_group() as life,
            ):
                self._announcing = anyio.Lock()
                self._clients = Watch(asyncio.get_running_loop(), self._hung_up)
                self._started, self._stopping = anyio.Event(), anyio.Event()
                ended = anyio.Event()
                self._tasks = await life.start(_host_tasks, ended)
                async with AsyncExitStack() as stack:
                    for _, lifespan in self.hooks.lifespan:
                        await stack.enter_async_context(lifespan(self))
                    known = {worker.url for worker in self.pool}  # of a plugin that remembers them
                    for url, about in self.first_workers.items():
                        if url not in known:
                            self._tasks.start_soon(partial(self.add_worker, url, **about))
                    self._started.set()
                    try:
                        yield
                    finally:
                        self._tasks.cancel_scope.cancel()
                        with anyio.CancelScope(shield=True):
                            await ended.wait()
                life.cancel_scope.cancel()
        finally:
            self.proxy.close()
            self._tasks = self._http = self._clients = None

    # The way of a request.

    async def respond(self, exchange: Exchange) -> Reply:
        """Take ``exchange`` through hooks and worker; the reply is the exchange's, and ends with it.

        Raises HTTPError.
        """
        hooks = self.hooks
        for plugin, pre_request in hooks.pre_request:
            try:
                reply = await pre_request(exchange)
            except Exception as error:
                raise failure(plugin, "pre_request", error) from error
            if reply is not None:
                exchange.reply = a_reply(plugin, "pre_request", reply)
                break
        else:
            exchange.reply = await self._forward(exchange, exchange.request)
        if hooks.post_response:
            await hooks.call_post_response(exchange)
        return exchange.reply

    async def ask_again(self, exchange: Exchange, request: Request) -> Reply:
        """Send ``request`` to a worker once more for ``exchange``, whose lease moves there; no hook sees it.

        For plugins that mend a reply, in ``post_response`` or while its body is read. The reply is the
        caller's to close, the lease the exchange's; give it back by ``exchange.release()`` while nothing is under
        way. Raises HTTPError.
        """
        return await self._forward(exchange, request)

    async def _forward(self, exchange: Exchange, request: Request) -> Reply:
        for plugin, forward in self.hooks.forward:
            try:
                reply = await forward(exchange, request)
            except Exception as error:
                raise failure(plugin, "forward", error) from error
            if reply is not None:
                return a_reply(plugin, "forward", reply)
        self.dispatcher.choose(exchange)
        return await self.dispatcher.send(exchange, request)

    @staticmethod
    def generation(
        payload: dict[str, Any], *, session: str | None = None, asked: Exchange | None = None
    ) -> Exchange:
        """A ``/generate`` of a plugin's own, for :meth:`respond`; the caller closes it.

        ``payload`` may hold numpy arrays; it belongs to the exchange from now on. ``asked`` is the client's exchange,
        if it is for one: when that client leaves, the engine is told.
        """
        request = Request("POST", b"/generate", [(b"content-type", b"application/json")])
        request.replace_json(payload)
        return Exchange(request, session=session or payload.get("session_id"), asked=asked)

    @asynccontextmanager
    async def generate(
        self, payload: dict[str, Any], *, session: str | None = None, asked: Exchange | None = None
    ) -> AsyncIterator[Reply]:
        """A ``/generate`` of a plugin's own, through all hooks and without a network hop to ourselves.

        The reply is to be read within the block. Raises HTTPError.
        """
        with self.generation(payload, session=session, asked=asked) as exchange:
            yield await self.respond(exchange)

    # Workers.

    async def add_worker(
        self,
        url: str,
        *,
        worker_type: WorkerType = "regular",
        bootstrap_port: int | None = None,
        model_id: str | None = None,
        labels: dict[str, str] | None = None,
        api_key: str | None = None,
    ) -> tuple[Worker, str | None]:
        """Register a worker, or give a known one a fresh start.

        Returns it and what was wrong with its first answer (None: it is ready). A worker that does not
        answer yet stays ``joining`` and is looked at again until it does. Raises BadRequest.
        """
        worker = self.pool.add(
            Worker(worker_url(url), worker_type, bootstrap_port, model_id, labels or {}, api_key=api_key)
        )
        trouble = await self._look_at(worker)
        if trouble is not None:
            logger.warning("worker %s does not answer yet: %s", worker.url, trouble)
            self._expect(worker)
        return worker, trouble

    def _expect(self, worker: Worker) -> None:
        """``worker`` does not answer yet: look at it until it does."""
        if worker.id not in self._expected:
            self._expected.add(worker.id)
            self.tasks.start_soon(self._wait_for, worker)

    async def _wait_for(self, worker: Worker) -> None:
        settings = self.settings
        until = anyio.current_time() + settings.worker_startup_timeout_s
        try:
            while worker in self.pool and worker.state == "joining":
                if anyio.current_time() >= until:
                    limit = settings.worker_startup_timeout_s
                    self.pool.quarantine(
                        worker, f"it has not answered within {limit:g} s of its registration"
                    )
                    return
                await anyio.sleep(settings.worker_startup_check_s)
                if await self._look_at(worker) is None:
                    return
        finally:
            self._expected.discard(worker.id)

    @property
    def several_models(self) -> bool:
        """Workers are told apart by their models, and those of more than one are registered, or of one unknown.

        Then versions of weights say nothing across workers.
        """
        return self.by_model and len({worker.model_id for worker in self.pool}) > 1

    def expect_one_model(self) -> None:
        """Weights are about to change. Raises BadRequest when they would be those of several models."""
        if self.several_models:
            models = ", ".join(sorted({worker.model_id or "one yet unknown" for worker in self.pool}))
            raise BadRequest(
                f"workers of several models are registered ({models}), whose weights are not one another's: tell the"
                " engines of one model directly, or use a router for each model"
            )

    def drain_worker(self, worker: Worker) -> None:
        """Give ``worker`` nothing new, and remove it when what it has in flight is done."""
        worker = worker.server
        self.pool.drain(worker)
        self.tasks.start_soon(self._leave_when_idle, worker)

    async def _leave_when_idle(self, worker: Worker) -> None:
        while worker in self.pool and worker.state == "draining":
            if not worker.load:
                self.pool.remove(worker)
            else:
                await anyio.sleep(_DRAINED_S)

    async def _look_at(self, worker: Worker) -> str | None:
        """Ask ``worker`` about itself; None when it answered, whatever it said, else what was wrong."""
        try:
            with anyio.fail_after(_FIRST_LOOK_S):  # httpx counts each step of a request by itself
                for path in ("/model_info", "/get_model_info"):
                    status, body = await self._get(worker, path)
                    if status != 404:
                        break
                if status < 500 and (self.settings.dp_aware or self.by_model):
                    told = await self._server_info(worker)
                    if self.settings.dp_aware:
                        self.pool.split(worker, ranks_told(told))
                    if self.by_model and worker.model_id is None:
                        worker.model_id = _served_model(told)
        except TimeoutError:
            return f"no answer within {_FIRST_LOOK_S:g} s"
        except Exception as error:  # httpcore on uvloop lets odd ones through; no worker may end the router
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if status >= 500:
            return f"it answered {status}"
        if status == 200:
            self._learn(worker, body)
        if worker.state == "joining":
            self.pool.ready(worker)
            logger.info("worker %s is ready", worker.url)
        return None

    async def _server_info(self, worker: Worker) -> bytes:
        for path in ("/server_info", "/get_server_info"):
            status, body = await self._get(worker, path)
            if status == 200:
                return body
        return b""

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """Status and body; of a body that is too long for what is asked, the beginning."""
        body = bytearray()
        headers = auth_headers(worker)
        async with self.http.stream(
            "GET", worker.url + path, headers=headers, timeout=_FIRST_LOOK_S
        ) as answer:
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > _MAX_INFO_BYTES:
                    break
        return answer.status_code, bytes(body)

    def _learn(self, worker: Worker, body: bytes) -> None:
        try:
            info = orjson.loads(body)
        except orjson.JSONDecodeError:
            return  # not an SGLang server; it can be proxied to all the same
        if not isinstance(info, dict):
            return
        version, model = version_named(info.get("weight_version")), info.get("model_path")
        if version is not None:
            worker.weight_version = version
            self.weights.see(version)
            if self.weights.current is None:
                self.weights.move(version, worker.url)  # learnt, not changed: no hook
        if worker.model_id is None and isinstance(model, str):
            worker.model_id = model

    def _worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change == "removed":
            self.proxy.forget(worker)
        elif change == "added":
            if worker.api_key is None:
                worker.api_key = self.settings.worker_api_key
            self.proxy.authorize(worker)
        logger.info("worker %s: %s", worker.url, change)
        self.hooks.worker_changed(worker, change)

    # Weights.

    async def announce_weights(self, version: str, source: str) -> WeightUpdate | None:
        """The workers in use serve ``version`` now: tell the plugins, in order, once. None when that was known."""
        assert self._announcing is not None, "the router is not serving"
        for worker in self.pool:  # now: when its turn has come they may be further
            if worker.state in ("joining", "ready"):  # of the others nobody knows
                worker.weight_version = version
        async with self._announcing:
            update = self.weights.move(version, source)
            if update is not None:
                logger.info("weights at version %s (was %s, by %s)", version, update.previous, source)
                await self.hooks.on_weight_update(update)
        return update


def _served_model(server_info: bytes) -> str | None:
    """What its clients call the model, if it says so."""
    try:
        document = orjson.loads(server_info)
    except orjson.JSONDecodeError:
        return None
    name = document.get("served_model_name") if isinstance(document, dict) else None
    return name if isinstance(name, str) and name else None


async def _host_tasks(ended: anyio.Event, *, task_status: TaskStatus[TaskGroup]) -> None:
    """A task group in a task of its own, so that it can be ended before the context that it was opened in."""
    try:
        async with anyio.create_task_group() as tasks:
            task_status.started(tasks)
            await anyio.sleep_forever()
    finally:
        ended.set()
