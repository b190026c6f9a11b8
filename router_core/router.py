"""The Router: the one object that all state hangs on."""

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
from router_core.errors import PluginError
from router_core.exchange import Exchange, SessionSource
from router_core.hooks import Hooks
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
        #: Each worker's requests in flight, by URL, under the names that slime's router has for its middleware.
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
        self._first_workers: dict[str, dict[str, Any]] = {}
        for url in settings.worker_urls:
            self.start_with(url, worker_type=settings.worker_type)
        #: Places of a session's name beside the headers and ``session_id`` of a request, asked in this order.
        self.session_sources: list[SessionSource] = []
        #: The paths that the router answers itself, in the order of its routes, and whether they are control: filled
        #: before ``asgi_middleware`` is called.
        self.own_paths: list[tuple[re.Pattern[str], bool]] = []
        #: Work on the event loop that takes longer than some milliseconds goes through here, in steps.
        self.long_work = FairTurns()
        #: And what cannot be cut into steps goes here.
        self.threads = FairThreads()
        self._life: Life | None = None
        for _, setup in self.hooks.setup:
            setup(self)
        #: The chain of senders: the proxy, and around it those of plugins.
        self.sender: Sender = self.proxy
        for plugin, wrap in reversed(self.hooks.sender):
            self.sender = wrap(self.sender, self)
            if self.sender is None:
                raise PluginError(f"plugin {plugin!r}: its sender returned None; wanted a Sender, or inner")

    @property
    def args(self) -> argparse.Namespace:
        """``options`` under the name that slime's middleware expects."""
        return self.options

    @property
    def addresses(self) -> AddressRules:
        """Rules for the servers that may be workers: the component ``"worker_addresses"``, else any server may."""
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
        """Notices clients that hang up."""
        return self._serving.clients

    @property
    def started(self) -> anyio.Event:
        """Set when all lifespans are entered: a plugin that remembers workers has them again."""
        return self._serving.started

    @property
    def stopping(self) -> anyio.Event:
        """Set when the router was told to end: who waits for a place or for a pause to end waits no longer."""
        return self._serving.stopping

    def stop(self) -> None:
        """The router was told to end, and finishes what is in flight."""
        if self._life is not None:
            self._life.stopping.set()

    def _hung_up(self, exchange: Exchange) -> bool:
        """The client of ``exchange`` has gone; true when all the workers that it is with were told."""
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
        """A client for what is rare: probes and control. It ignores the environment's proxies; set a timeout."""
        return self._serving.http

    def worker_transport(self, **options: Any) -> httpx.AsyncBaseTransport:
        """For an httpx client of workers: checks who they are, and shows who we are. ``options`` are httpx's.

        Send :func:`router_core.workers.auth_headers` along.
        """
        return CheckedTransport(self._reachable, verify=self.worker_tls, **options)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The router's life: task group, probes' client, the plugins' lifespans; all ended on leaving.

        Background work ends before the lifespans do, whose resources it uses; when it crashes, so does the router.
        """
        import slime_fairness.large_json  # noqa: F401  # numpy, which would hold up the first large body

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
                    for _, lifespan in self.hooks.lifespan:
                        await stack.enter_async_context(lifespan(self))
                    await registration.add_first(self._first_workers)
                    life.started.set()
                    try:
                        yield
                    finally:
                        await end_tasks()
        finally:
            self.proxy.close()
            self._life = None

    # The way of a request.

    async def respond(self, exchange: Exchange) -> Reply:
        """Take ``exchange`` through hooks and worker; the reply ends with the exchange. Raises HTTPError."""
        hooks = self.hooks
        if exchange.request.is_long_work:
            await self.read_ahead(exchange, *(() if self.session_sources else (b"session_id",)))
        reply = await hooks.call_pre_request(exchange) if hooks.pre_request else None
        if reply is None:
            self.sender.choose(exchange)
            reply = await self.sender.send(exchange, exchange.request)
        exchange.reply = reply
        if hooks.post_response:
            await hooks.call_post_response(exchange)
        return exchange.reply

    async def read_json(self, exchange: Exchange) -> Any:
        """The body of ``exchange`` as JSON, see :meth:`Request.json`; a large one is parsed as long work.

        Raises BadRequest.
        """
        request = exchange.request
        if request.is_long_work:
            await self.long_work.run(request.reading(), exchange.client)
        return request.json()

    async def read_ahead(self, exchange: Exchange, *names: bytes) -> None:
        """Parse a large body that may have one of ``names`` (none: any body): then :meth:`Request.json` costs nothing.

        What is wrong with the body is raised there, not here.
        """
        request = exchange.request
        if request.is_long_work and (
            not names or await self.long_work.run(request.searching(*names), exchange.client)
        ):
            await self.long_work.run(request.reading(), exchange.client)

    async def write_json(self, exchange: Exchange) -> None:
        """Encode what a plugin has put into the body of ``exchange``, a large one, as long work. Raises BadRequest."""
        await self.long_work.run(exchange.request.writing(), exchange.client)

    async def ask_again(self, exchange: Exchange, request: Request) -> Reply:
        """Send ``request`` to a worker once more for ``exchange``, by the chain of senders; its lease moves there.

        For plugins that mend a reply, in ``post_response`` or while its body is read. ``pre_request`` and
        ``post_response`` are not called; ``select_worker`` and ``attempt_failed`` are. The caller closes the reply, and
        calls ``exchange.release()`` while nothing is under way. Raises HTTPError.
        """
        self.sender.choose(exchange)
        return await self.sender.send(exchange, request)

    def generation(
        self, payload: dict[str, Any], *, session: str | None = None, parent: Exchange | None = None
    ) -> Exchange:
        """A ``/generate`` of a plugin's own, for :meth:`respond`; the caller closes it.

        ``payload`` may hold numpy arrays; it belongs to the exchange from now on. ``parent`` is the client's exchange,
        if it is for one: when that client leaves, the engine is told, and its request id is passed on.
        """
        headers = [(b"content-type", b"application/json")]
        if parent is not None and (names := self.settings.request_id_headers):
            headers += [pair for pair in parent.request.headers if pair[0] in names]
        request = Request("POST", b"/generate", headers)
        request.replace_json(payload)
        return Exchange(request, session=session or payload.get("session_id"), parent=parent)

    @asynccontextmanager
    async def generate(
        self, payload: dict[str, Any], *, session: str | None = None, parent: Exchange | None = None
    ) -> AsyncIterator[Reply]:
        """A ``/generate`` of a plugin's own, through all hooks and without a network hop to ourselves.

        The reply is to be read within the block. Raises HTTPError.
        """
        with self.generation(payload, session=session, parent=parent) as exchange:
            yield await self.respond(exchange)

    # Workers.

    async def add_worker(self, url: str, **about: Any) -> tuple[Worker, str | None]:
        """Register a worker, see :meth:`Registration.add`."""
        return await self.registration.add(url, **about)

    def start_with(self, url: str, **about: Any) -> None:
        """Register ``url`` when the router starts, as :meth:`add_worker` does with ``about``; to be called in setup."""
        self._first_workers[url] = about

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
        for worker in self.pool:  # now: when its turn has come they may be further
            if worker.in_use:  # of the others nobody knows
                self.pool.set_version(worker, version)
        async with self._serving.announcing:
            update = self.weights.move(version, source)
            if update is not None:
                logger.info("weights at version %s (was %s, by %s)", version, update.previous, source)
                await self.hooks.on_weight_update(update)
        return update
