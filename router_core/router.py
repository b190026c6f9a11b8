"""The Router: the object that holds all state."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
import pluggy
from anyio.abc import TaskGroup

from router_core.addresses import ANYWHERE, AddressRules
from router_core.client import Watch
from router_core.exchange import Exchange, SessionSource
from router_core.hooks import Hooks, attribute_errors
from router_core.life import Life, background
from router_core.pool import WorkerPool
from router_core.proxy import Proxy
from router_core.registration import Registration
from router_core.registry import ComponentRegistry
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.settings import Settings
from router_core.weights import WeightUpdate, WeightVersions
from router_core.worker_urls import WorkerUrls
from router_core.workers import Worker, WorkerChange
from slime_fairness.turns import FairThreads, FairTurns
from slime_http.checked_transport import CheckedTransport
from slime_http.limits import Limits

__all__ = ["Router"]

logger = logging.getLogger(__name__)


class Router:
    """All state of one router. A process may have several routers.

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
        #: The number of requests in flight at each worker, by URL. Both names are slime's, for its middleware.
        self.worker_urls = self.worker_request_counts = WorkerUrls(self.pool)
        self.worker_tls = settings.worker_tls()
        limits = Limits(
            connect_s=settings.connect_timeout_s,
            first_byte_s=settings.first_byte_timeout_s,
            silence_s=settings.silence_timeout_s,
        )
        on_failure = self.hooks.call_attempt_failed
        self.proxy = Proxy(
            self.pool, self.hooks.select_worker, limits, self.worker_tls, on_failure, self._reachable
        )
        first: dict[str, Any] = {"worker_type": settings.worker_type}
        self._first_workers = dict.fromkeys(settings.worker_urls, first)
        #: Called in turn, until one finds a session, for a request that names none in headers or ``session_id``.
        self.session_sources: list[SessionSource] = []
        #: Names of headers that a plugin's own request copies from the client's request; plugins may add names.
        self.carried_headers = {*(settings.request_id_headers or ()), b"traceparent", b"tracestate"}
        #: For each of the router's own routes, in order: the pattern of its path, and True for a control route. Filled
        #: before ``asgi_middleware`` is called.
        self.own_paths: list[tuple[re.Pattern[str], bool]] = []
        #: Runs long work (more than some milliseconds) on the event loop, in steps.
        self.long_work = FairTurns()
        #: Runs other long work, which cannot be cut into steps, in threads.
        self.threads = FairThreads()
        self._life: Life | None = None
        for _, setup in self.hooks.setup:
            setup(self)
        #: The chain of senders: plugins' layers around the proxy.
        self.sender: Sender = self.proxy
        for _, wrap in reversed(self.hooks.sender):
            self.sender = wrap(self.sender, self)

    @property
    def args(self) -> argparse.Namespace:
        """``options`` under the name that slime's middleware expects."""
        return self.options

    @property
    def addresses(self) -> AddressRules:
        """The component ``"worker_addresses"``: rules for workers' addresses. Without it any server may be a worker."""
        rules: AddressRules | None = self.components.find("worker_addresses")
        return ANYWHERE if rules is None else rules

    def _reachable(self, url: str, address: str) -> bool:
        return self.addresses.reachable(url, address)

    @property
    def _serving(self) -> Life:
        assert self._life is not None, "the router is not serving: start background work in the lifespan hook"
        return self._life

    @property
    def clients(self) -> Watch:
        """Detects clients that hang up."""
        return self._serving.clients

    @property
    def started(self) -> anyio.Event:
        """Set when all lifespans are entered, and the restored workers and the workers to start with are registered."""
        return self._serving.started

    @property
    def stopping(self) -> anyio.Event:
        """Set when the router shuts down: requests that wait for a slot or for the end of a pause stop waiting."""
        return self._serving.stopping

    def stop(self) -> None:
        """Set :attr:`stopping`. The server calls this when it shuts down, before it finishes requests in flight."""
        if self._life is not None:
            self._life.stopping.set()

    def _hung_up(self, exchange: Exchange) -> bool:
        """Mark the client of ``exchange`` as gone. Returns True when there are workers, and all were told to stop."""
        told = [self.hooks.client_gone(each) for each in exchange.hang_up()]
        return bool(told) and all(told)

    @property
    def tasks(self) -> TaskGroup:
        """The task group for background work, open while the router serves."""
        return self._serving.tasks

    @property
    def registration(self) -> Registration:
        """Registers workers, and asks them about themselves."""
        return self._serving.registration

    @property
    def http(self) -> httpx.AsyncClient:
        """An HTTP client for rare calls: probes and control. It ignores proxies in the environment. Set a timeout."""
        return self._serving.http

    def worker_transport(self, **options: Any) -> httpx.AsyncBaseTransport:
        """Make a transport for an httpx client that calls workers, with the address rules and the TLS settings.

        ``options`` are httpx's. Each request needs the headers of :func:`router_core.workers.auth_headers`.
        """
        return CheckedTransport(self._reachable, verify=self.worker_tls, **options)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the HTTP client, the task group and the plugins' lifespans; close them on leaving.

        Background work ends before the lifespans, since it uses their resources. If such work crashes, the router ends.
        """
        import slime_fairness.large_json  # noqa: F401  # imports numpy now, not with the first large body

        try:
            async with (
                httpx.AsyncClient(trust_env=False, transport=self.worker_transport()) as http,
                background() as (tasks, end_tasks),
            ):
                introduction = self.components.find("introduction")
                registration = Registration(self.pool, self.settings, http, tasks, introduction)
                clients = Watch(asyncio.get_running_loop(), self._hung_up)
                life = self._life = Life(tasks, http, clients, registration)
                async with AsyncExitStack() as stack:
                    try:
                        for plugin, lifespan in self.hooks.lifespan:
                            with attribute_errors(plugin, "lifespan"):
                                await stack.enter_async_context(lifespan(self))
                        await registration.add_first(self._first_workers)
                        life.started.set()
                        yield
                    finally:
                        await end_tasks()
        finally:
            self.proxy.close()
            self._life = None

    # The path of a request.

    async def respond(self, exchange: Exchange) -> Reply:
        """Answer ``exchange`` by the hooks and a worker. Closing the exchange closes the reply. Raises HTTPError."""
        hooks = self.hooks
        if exchange.request.is_long_work:
            await self.read_ahead(exchange, *(() if self.session_sources else (b"session_id",)))
        reply = await hooks.call_pre_request(exchange) if hooks.pre_request else None
        if reply is None:
            self.sender.choose(exchange)
            reply = await self.sender.send(exchange, exchange.request)
            if not isinstance(reply, Reply):
                raise hooks.sender_failed(f"returned {reply!r}; wanted a router_core.Reply")
        exchange.reply = reply
        if hooks.post_response:
            await hooks.call_post_response(exchange)
        return exchange.reply

    async def read_json(self, exchange: Exchange) -> Any:
        """Return the body of ``exchange`` as JSON, see :meth:`Request.json`; parse a large body as long work.

        Raises BadRequest.
        """
        request = exchange.request
        if request.is_long_work:
            await self.long_work.run(request.reading(), exchange.client)
        return request.json()

    async def read_ahead(self, exchange: Exchange, *names: bytes) -> None:
        """Parse a large body that may have one of ``names`` (without names: any large body) as long work.

        Once it is parsed, :meth:`Request.json` returns at once, or raises BadRequest for a body that is not JSON.
        """
        request = exchange.request
        if request.is_long_work and (
            not names or await self.long_work.run(request.searching(*names), exchange.client)
        ):
            await self.long_work.run(request.reading(), exchange.client)

    async def write_json(self, exchange: Exchange) -> None:
        """Encode the large body that a plugin has given to ``exchange``, as long work. Raises as Request.body does."""
        await self.long_work.run(exchange.request.writing(), exchange.client)

    async def ask_again(self, exchange: Exchange, request: Request) -> Reply:
        """Choose a worker again, move the lease to it, and send ``request`` to it through the chain of senders.

        For plugins that repair a reply, in ``post_response`` or while its body is read. ``pre_request`` and
        ``post_response`` are not called; ``select_worker`` and ``attempt_failed`` are. The caller closes the reply, and
        calls ``exchange.release()`` before it waits without a request to a worker. Raises HTTPError.
        """
        self.sender.choose(exchange)
        return await self.sender.send(exchange, request)

    def generation(
        self, payload: dict[str, Any], *, session: str | None = None, parent: Exchange | None = None
    ) -> Exchange:
        """Make an exchange with a plugin's own ``/generate`` request, for :meth:`respond`. The caller closes it.

        ``payload`` may hold numpy arrays; do not change it later. ``parent``: the client's exchange, if any. The engine
        gets the client's ``carried_headers``. ``client_gone`` gets this exchange, too, if it has a worker.
        """
        headers = [(b"content-type", b"application/json")]
        if parent is not None:
            headers += [pair for pair in parent.request.headers if pair[0] in self.carried_headers]
        request = Request("POST", b"/generate", headers)
        request.replace_json(payload)
        return Exchange(request, session=session or payload.get("session_id"), parent=parent)

    @asynccontextmanager
    async def generate(
        self, payload: dict[str, Any], *, session: str | None = None, parent: Exchange | None = None
    ) -> AsyncIterator[Reply]:
        """Send a plugin's own ``/generate`` through the hooks of a request, without a network hop to the router.

        Read the reply within the block. Raises HTTPError.
        """
        with self.generation(payload, session=session, parent=parent) as exchange:
            yield await self.respond(exchange)

    # Workers.

    async def add_worker(self, url: str, **about: Any) -> tuple[Worker, str | None]:
        """Register a worker, see :meth:`Registration.add`."""
        return await self.registration.add(url, **about)

    def start_with(self, url: str, **about: Any) -> None:
        """Register ``url`` at start, as :meth:`add_worker` does with ``about``. Call this in setup."""
        self._first_workers[url] = about

    def _worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change == "removed":
            self.proxy.forget(worker)
        elif change == "added":
            if worker.api_key is None:
                worker.api_key = self.settings.worker_api_key
            self.proxy.authorize(worker)
        why = worker.removal if change == "removed" else worker.reason
        logger.info("worker %s: %s%s", worker.url, change, f", {why}" if why else "")
        self.hooks.worker_changed(worker, change)

    # Weights.

    async def announce_weights(self, version: str, source: str) -> WeightUpdate | None:
        """Set ``version`` for workers in use and the fleet, and call the plugins. Returns None if the fleet had it."""
        for worker in self.pool:  # before the wait for the lock: later the workers may have a newer version
            if worker.in_use:  # the versions of other workers are unknown
                self.pool.set_version(worker, version)
        async with self._serving.announcing:
            update = self.weights.move(version, source)
            if update is not None:
                logger.info("weights at version %s (was %s, by %s)", version, update.previous, source)
                await self.hooks.on_weight_update(update)
        return update
