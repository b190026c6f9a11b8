"""All hooks. This is the page to read before writing a plugin.

Pluggy registers plugins, and ``hooks`` calls them. ``pre_request`` and ``post_response`` may be plain or async
functions. They run one after the other, so a later plugin sees what an earlier one did: in ``--plugin`` order,
``post_response`` in reverse, like the layers of an onion. ``tryfirst`` and ``trylast`` move an implementation to an end
of that order. An implementation may leave out arguments that it does not need. docs/hooks.md says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pluggy
from starlette.routing import BaseRoute

from router_core.errors import HTTPError
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.types import ASGIApp
from router_core.weights import WeightUpdate
from router_core.workers import Worker, WorkerChange

if TYPE_CHECKING:
    from router_core.router import Router

__all__ = ["PROJECT", "WorkerChange", "hookimpl", "hookspec"]

#: The name of the pluggy project and of the entry-point group.
PROJECT = "slime_router"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's own flags.

    When: once, before the command line is parsed, and only for plugins that are loaded. This one is a
    function of the module that holds the factory, since the factory wants the parsed options.
    A flag that another plugin has added already is an error at start.
    """


@hookspec
def setup(router: Router) -> None:
    """Register components and look up those of others.

    When: once, in ``--plugin`` order, when the router exists and before it listens. There is no event loop.
    Raise a StartupError (SettingsError, MissingComponent) to end the start with one line and exit code 2.
    """


@hookspec
def routes(router: Router) -> Sequence[BaseRoute]:  # type: ignore[empty-body]
    """Starlette routes that the plugin answers itself.

    When: once, after ``setup``. They come before the proxy. A path that is claimed already is an error at start.
    """


@hookspec
def asgi_middleware(app: ASGIApp, router: Router) -> ASGIApp:  # type: ignore[empty-body]
    """Wrap the whole application in ASGI middleware.

    When: once, after ``routes``; the first plugin's is the outermost. It sees a request before its key and its route
    are looked at. The path and headers that it passes on are authorized, routed and recorded. It passes scopes of
    other types on. An exception ends the start; one while a request is served is a bare 500.
    """


@hookspec
def lifespan(router: Router) -> AbstractAsyncContextManager[None]:  # type: ignore[empty-body]
    """An async context that is open while the router serves: the place for background work.

    When: entered in ``--plugin`` order before the first request, left in reverse after the last one.
    ``router.tasks`` is the task group to start work in; it has ended when the first lifespan is left.
    An exception on entering ends the start. Background work handles its own: one that leaves a task ends the
    router, with exit code 1.
    """


@hookspec
async def pre_request(exchange: Exchange) -> Reply | None:
    """See, change or answer a request.

    When: once per request, after its body was read and before a worker is chosen, in ``--plugin`` order.
    Change ``exchange.request`` in place, or return a Reply to answer without a worker: the first one wins
    and later plugins are not asked. HTTPErrors reach the client as they are; any other exception becomes
    a 500 that names the plugin. No worker is leased yet, so nothing can leak.
    """


@hookspec(firstresult=True)
def select_worker(exchange: Exchange, workers: Sequence[Worker]) -> Worker | None:
    """Choose the worker for a request.

    When: after ``pre_request``, unless the request's session keeps its worker. ``workers`` are those that
    may be used now; never empty. The first answer that is not None wins; without one the least loaded
    worker is taken. There is no await between this and the lease, so counts cannot move in between.
    An exception, or a worker that was not offered, becomes a 500 that names the plugin.
    """


@hookspec
def sender(inner: Sender, router: Router) -> Sender:  # type: ignore[empty-body]
    """Wrap how workers are asked, and return the wrap; ``inner`` itself when there is nothing to do.

    When: once, after ``setup``; the first plugin's is the outermost, the innermost is the proxy. What it makes is used
    each time a worker is to be asked: the first time, and when a plugin asks again. HTTPErrors reach the client as they
    are; any other exception becomes a 500.
    """


@hookspec
def attempt_failed(worker: Worker, request: Request, error: HTTPError | None) -> None:
    """A request that was meant for ``worker`` will not be answered to its end.

    When: right then. ``error`` is what the worker did (WorkerUnreachable, WorkerBroke, WorkerTimeout), and None when
    the router gave it up: the client has left, or a plugin. An exception is logged.
    """


@hookspec
def client_gone(exchange: Exchange) -> bool | None:
    """The client hung up while its request is with ``exchange.worker``.

    When: right then, for requests that are older than 50 ms. Return True when the worker was told to stop. Then the
    exchange goes on for up to two seconds, so that the sampled tokens are recorded. If no plugin returns True, the
    exchange is cancelled at once. An exception is logged.
    """


@hookspec
async def post_response(exchange: Exchange) -> None:
    """See or change the reply, or record it.

    When: once per reply, when its status and headers are known and before the client got anything, in
    reverse ``--plugin`` order. ``await exchange.reply.read()`` makes it a whole reply (do not do so to an
    endless stream); ``exchange.reply.tap(...)`` watches a stream; untouched bytes pass unchanged. Not called when
    no reply came: ``exchange.on_close`` is for clean-up that must happen always.
    An exception becomes a 500 that names the plugin.
    """


@hookspec
async def on_weight_update(update: WeightUpdate) -> None:
    """The fleet moved to new weights.

    When: once per change of the fleet's version, in order, in ``--plugin`` order, before the call that
    announced it is answered. An exception becomes a 500 that names the plugin, after the others were told.
    """


@hookspec
def worker_changed(worker: Worker, change: WorkerChange) -> None:
    """A worker was added, removed, quarantined, found stale, readmitted or set to draining.

    When: right after the change, which stands whatever the hook does: an exception is logged.
    """
