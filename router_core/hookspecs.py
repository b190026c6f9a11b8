"""All hooks. Read this module before you write a plugin; docs/hooks.md has the details.

The router calls the plugins one after the other, in ``--plugin`` order, but each after the plugins that it requires.
So a later plugin sees what an earlier plugin did. ``post_response`` runs in reverse order, like the layers of an onion.
``tryfirst`` and ``trylast`` move an implementation to the beginning or the end of the order. ``pre_request`` and
``post_response`` may be plain or async functions. An implementation may leave out arguments.
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

    When: before the command line is parsed; also for plugins that are not loaded, so that errors can name their flags.
    The hook is a function of the module that has the plugin's factory, since the factory gets the parsed options.
    A flag that another plugin has added already is an error at start.
    """


@hookspec
def setup(router: Router) -> None:
    """Register components, and look up components of other plugins.

    When: once, when the router exists and before it listens. There is no event loop.
    Raise a StartupError (SettingsError, MissingComponent) to end the start with one line and exit code 2.
    """


@hookspec
def routes(router: Router) -> Sequence[BaseRoute]:  # type: ignore[empty-body]
    """Return Starlette routes that the plugin answers itself.

    When: once, after ``setup``. Requests that match no route are proxied. A route claimed twice is an error at start.
    """


@hookspec
def asgi_middleware(app: ASGIApp, router: Router) -> ASGIApp:  # type: ignore[empty-body]
    """Wrap the whole application in ASGI middleware.

    When: once, after ``routes``; the first plugin's middleware is the outermost. Middleware sees a request before
    authorization and routing, which use the path and headers that it passes on. Pass on scopes other than ``http``.
    An exception in the hook ends the start; an exception while a request is served becomes a 500 that names the plugin.
    """


@hookspec
def lifespan(router: Router) -> AbstractAsyncContextManager[None]:  # type: ignore[empty-body]
    """Return an async context manager that is open while the router serves: the place for background work.

    When: entered in order before the first request, left in reverse after the last one.
    ``router.tasks`` is the task group for background work; at shutdown it ends before any lifespan is left.
    An exception on entering ends the start. Background work must handle its exceptions: an exception that leaves a
    task ends the router, with exit code 1.
    """


@hookspec
async def pre_request(exchange: Exchange) -> Reply | None:
    """See, change or answer a request.

    When: once per request, after its body was read and before a worker is chosen; after the default plugins ``limits``
    and ``sessions``, or before them if marked ``tryfirst``. Change ``exchange.request`` in place, or return a Reply:
    the first Reply wins, and later plugins are not called. An HTTPError reaches the client as it is; any other
    exception becomes a 500 that names the plugin. No worker is leased yet, so no lease can leak.
    """


@hookspec(firstresult=True)
def select_worker(exchange: Exchange, workers: Sequence[Worker]) -> Worker | None:
    """Choose the worker for a request.

    When: after ``pre_request``, unless the request's session keeps its worker. ``workers``: the eligible workers,
    never empty. The first choice that is not None wins; if all return None, the least loaded worker is taken.
    No await separates choice and lease, so the workers' loads cannot change in between. An HTTPError reaches the client
    as it is; any other exception, or a worker that was not offered, becomes a 500 that names the plugin.
    """


@hookspec
def sender(inner: Sender, router: Router) -> Sender:  # type: ignore[empty-body]
    """Wrap the sender ``inner``, and return the wrapper; return ``inner`` itself when there is nothing to do.

    When: once, after ``setup``; the first plugin's wrapper is the outermost, the proxy is innermost. Each request for
    which a worker is chosen goes through the wrapper, also each ``generate`` and ``ask_again`` of a plugin. An
    HTTPError of the wrapper reaches the client as it is; any other exception becomes a 500 that names the plugin.
    """


@hookspec
def attempt_failed(worker: Worker, request: Request, error: HTTPError | None) -> None:
    """React to a request to ``worker`` that failed or was given up.

    When: at once. ``error`` is the worker's failure: WorkerUnreachable, WorkerBroke or WorkerTimeout. It is None when
    the attempt was given up, for example because the client left or a plugin closed the reply. An exception is logged.
    """


@hookspec
def client_gone(exchange: Exchange) -> bool | None:
    """React to a client that hung up while ``exchange.worker`` serves its request.

    When: at once, or at most 50 ms later if the request has just begun. Return True when the worker was told to stop.
    Then the exchange goes on for up to two seconds, so that the sampled tokens are recorded. If for one of a request's
    exchanges no plugin returns True, the whole request is cancelled at once. An exception is logged.
    """


@hookspec
async def post_response(exchange: Exchange) -> None:
    """See or change the reply, or record it.

    When: once per reply, when its status and headers are known and before the client got anything; in reverse
    order. ``await exchange.reply.read()`` returns the whole body (not for an endless stream);
    ``exchange.reply.tap(...)`` watches a stream. Bytes that no plugin changes pass unchanged. The hook is not called
    without a reply: use ``exchange.on_close`` for clean-up that must always happen. An HTTPError reaches the client as
    it is; any other exception becomes a 500 that names the plugin.
    """


@hookspec
async def on_weight_update(update: WeightUpdate) -> None:
    """React to new weights of the fleet.

    When: once per change of the fleet's version, one change after the other, before the call that announced the version
    is answered. All plugins are called; then the first exception becomes the answer, as in ``pre_request``.
    """


@hookspec
def worker_changed(worker: Worker, change: WorkerChange) -> None:
    """React to a worker that was added, removed, quarantined, marked stale, readmitted or set to draining.

    When: right after the change. An exception is logged, and the change stands.
    """


@hookspec
def weights_confirmed(worker: Worker) -> None:
    """Release the plugin's own hold of ``worker`` if the hold waits for the fleet's weights.

    When: a plugin has found that ``worker`` may serve with the weights that it has. An exception is logged.
    """
