"""Hook implementations in the order in which they are called.

pluggy is synchronous: with ``firstresult=True`` it would return the first coroutine, even if its result is None.
pluggy calls plugins in the reverse order of their registration; this module restores the order of registration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pluggy

from router_core import hookspecs
from router_core.errors import HTTPError, MissingComponent, PluginError, PluginFailed, StartupError
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.weights import WeightUpdate
from router_core.workers import Worker, WorkerChange
from slime_http.message_faults import UnsendableRequest, UnwritableBody, reply_fault, request_fault
from slime_start.hook_functions import by_position, misfit
from slime_start.owners import Owners

__all__ = ["Hooks", "attribute_errors", "failure", "hook_names", "new_plugin_manager"]

logger = logging.getLogger(__name__)

#: By start-up hook: an attribute that each valid result has, and a description of a valid result for errors.
_RESULTS = {
    "asgi_middleware": ("__call__", "an ASGI application"),
    "routes": ("__iter__", "a list of routes"),
    "sender": ("send", "a Sender, or inner"),
}
#: Removed hooks, and the hooks that replace them.
_REPLACED = {"forward": "sender(inner, router)"}


def hook_names() -> list[str]:
    """Return the names of all hooks, sorted."""
    mark = f"{hookspecs.PROJECT}_spec"
    return sorted(name for name, value in vars(hookspecs).items() if hasattr(value, mark))


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        # No hook has a private name, but most names of a plugin are private, and pluggy would inspect each of them.
        return None if name.startswith("_") else super().parse_hookimpl_opts(plugin, name)


def new_plugin_manager() -> pluggy.PluginManager:
    """Make a plugin manager that knows the hooks, and has no plugins."""
    manager = _Manager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _in_order(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return ``(plugin, function)`` of each implementation, tryfirst first, trylast last. Raises PluginError."""
    caller, found = getattr(manager.hook, hook), []
    place = {name: place for place, (name, _) in enumerate(manager.list_name_plugin())}  # as registered
    items = caller.get_hookimpls()
    for item in sorted(items, key=lambda item: (item.trylast, not item.tryfirst, place[item.plugin_name])):
        if (wrong := misfit(hook, item)) is not None:
            raise PluginError(f"plugin {item.plugin_name!r}: {hook} must {wrong}")
        found.append((item.plugin_name, by_position(item.function, item.argnames, caller.spec.argnames)))
    return found


class Hooks:
    """The hook implementations of a router's plugins: a list for each hook, in the order of the calls."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        _refuse_unknown(manager)
        #: The names of the plugins, in the order of registration.
        self.plugins = [name for name, _ in manager.list_name_plugin()]
        self.owners = Owners()
        for name, plugin in manager.list_name_plugin():
            self.owners.add(name, plugin)
        self.pre_request = _in_order(manager, "pre_request")
        self.post_response = _in_order(manager, "post_response")[::-1]
        self.attempt_failed = _in_order(manager, "attempt_failed")
        self._client_gone = _in_order(manager, "client_gone")
        self._select_worker = _in_order(manager, "select_worker")
        self._on_weight_update = _in_order(manager, "on_weight_update")
        self._worker_changed = _in_order(manager, "worker_changed")
        self._weights_confirmed = _in_order(manager, "weights_confirmed")
        self.setup = _at_start(manager, "setup")
        self.sender = _at_start(manager, "sender")
        self.routes = _at_start(manager, "routes")
        self.asgi_middleware = _at_start(manager, "asgi_middleware")
        self.lifespan = _in_order(manager, "lifespan")

    @property
    def choosers(self) -> list[str]:
        """The plugins that choose workers, in the order of the calls."""
        return [plugin for plugin, _ in self._select_worker]

    def call_attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
        """Call each plugin; an exception is logged."""
        _call_each("attempt_failed", self.attempt_failed, worker, request, error)

    def client_gone(self, exchange: Exchange) -> bool:
        """Call each plugin; returns True when one of them has told the worker to stop. An exception is logged."""
        return any(_call_each("client_gone", self._client_gone, exchange))

    async def call_pre_request(self, exchange: Exchange) -> Reply | None:
        """Call each plugin in turn until one returns a reply. Return that reply, or None if no plugin returns one."""
        request, foreign = exchange.request, self.owners.foreign
        before, target, method = request.headers[:], request.target, request.method
        for plugin, function in self.pre_request:
            value, is_stale = request._json, request._stale
            try:
                reply = function(exchange)
                if reply is not None and hasattr(reply, "__await__"):
                    reply = await reply
                if plugin in foreign and (request._json is not value or request._stale is not is_stale):
                    request.encode_for(plugin)  # an error raised here names this plugin
            except HTTPError:
                raise
            except Exception as error:
                raise failure(plugin, "pre_request", error) from error
            if request.headers != before or request.target is not target or request.method is not method:
                _refuse(plugin, "pre_request", _fault_of(request))
                before, target, method = request.headers[:], request.target, request.method
            if reply is not None:
                return _a_reply(plugin, "pre_request", reply)
        return None

    async def call_post_response(self, exchange: Exchange) -> None:
        """Call each plugin, the last one first."""
        reply = exchange._reply
        assert reply is not None  # narrowing: it has come
        before, status = reply.headers[:], reply.status
        for plugin, function in self.post_response:
            try:
                if (waits := function(exchange)) is not None:
                    await waits
            except HTTPError:
                raise
            except Exception as error:
                raise failure(plugin, "post_response", error) from error
            if reply is not exchange._reply:
                reply = exchange._reply
                if reply is None:
                    raise failure(plugin, "post_response", TypeError("left None as the exchange's reply"))
            if reply.headers != before or reply.status is not status:
                _refuse(plugin, "post_response", reply_fault(reply.status, reply.headers))
                before, status = reply.headers[:], reply.status

    def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker | None:
        """Return the first choice of a plugin, or None."""
        headers = exchange.request.headers[:]
        for plugin, function in self._select_worker:
            try:
                worker: Worker | None = function(exchange, workers)
            except HTTPError:
                raise
            except Exception as error:
                raise failure(plugin, "select_worker", error) from error
            if exchange.request.headers != headers:
                _refuse(plugin, "select_worker", _fault_of(exchange.request))
                headers = exchange.request.headers[:]
            if worker is not None:
                if worker not in workers:
                    wrong = ValueError(f"not among the workers offered: {worker!r}")
                    raise failure(plugin, "select_worker", wrong)
                return worker
        return None

    def unexpected(
        self, error: BaseException, request: Request | None = None, reply: Reply | None = None, by: Any = None
    ) -> HTTPError:
        """Return the 500 for ``error``; it names the plugin that raised, if that is known. The caller logs ``error``.

        Looks for faults in ``request`` and ``reply``, because only changes by ``pre_request``, ``select_worker`` and
        ``post_response`` were checked before. ``by``: the function of the route that should have answered.
        """
        message = "internal error; the router's log has the traceback"
        fault = reply_fault(reply.status, reply.headers) if reply is not None else None
        if fault is not None and any(name in self.owners.foreign for name, _ in self.sender):
            return self.sender_failed(fault)
        if reply is None and request is not None and (fault := _fault_of(request)) is not None:
            message = "internal error: middleware, or a plugin's sender, broke the request; the router's log says how"
            logger.error("middleware, or a plugin's sender, broke the request: %s", fault)
        if isinstance(error, UnwritableBody) and request is not None and request.author is not None:
            return failure(request.author, "pre_request", error)
        if (found := self.owners.culprit(error, UnsendableRequest, by)) is None:
            return HTTPError(message)
        logger.error("plugin %r failed in %s", *found)
        return PluginFailed(*found)

    def sender_failed(self, fault: str) -> HTTPError:
        """Log the ``fault`` of a reply that the layers of ``sender`` have made, and return the 500."""
        layers = [name for name, _ in self.sender]
        foreign = [name for name in layers if name in self.owners.foreign]
        return failure(" or ".join(foreign or layers), "sender", TypeError(fault))

    async def on_weight_update(self, update: WeightUpdate) -> None:
        """Call each plugin, then raise the first failure, if any."""
        failed: list[HTTPError] = []
        for plugin, function in self._on_weight_update:
            try:
                await function(update)
            except Exception as error:
                failed.append(failure(plugin, "on_weight_update", error))
        if failed:
            raise failed[0]

    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        """Call each plugin; an exception is logged."""
        _call_each("worker_changed", self._worker_changed, worker, change)

    def weights_confirmed(self, worker: Worker) -> None:
        """Call each plugin; an exception is logged. A plugin calls this when ``worker`` may serve with its weights."""
        _call_each("weights_confirmed", self._weights_confirmed, worker)


def _call_each(hook: str, found: list[tuple[str, Callable[..., Any]]], *arguments: object) -> list[Any]:
    """Call the function of each plugin, and return the results; an exception is logged."""
    results = []
    for plugin, function in found:
        try:
            results.append(function(*arguments))
        except Exception:
            logger.exception("plugin %r failed in %s", plugin, hook)
    return results


def _a_reply(plugin: str, hook: str, reply: object) -> Reply:
    """Return the ``reply`` of ``plugin``. Raises PluginFailed when it is not a Reply."""
    if not isinstance(reply, Reply):
        raise failure(plugin, hook, TypeError(f"wanted a router_core.Reply or None, got {reply!r}"))
    _refuse(plugin, hook, reply_fault(reply.status, reply.headers))
    return reply


def _fault_of(request: Request) -> str | None:
    return request_fault(request.method, request.target, request.headers)


def _refuse(plugin: str, hook: str, fault: str | None) -> None:
    """Raise PluginFailed if ``plugin`` has left a request or a reply with a ``fault``."""
    if fault is not None:
        raise failure(plugin, hook, TypeError(fault))


def failure(plugin: str, hook: str, error: Exception) -> HTTPError:
    """Return ``error`` of ``plugin`` if it is an HTTPError; else log it and return a PluginFailed."""
    if isinstance(error, HTTPError):
        return error
    logger.error("plugin %r failed in %s", plugin, hook, exc_info=error)
    return PluginFailed(plugin, hook)


@contextmanager
def attribute_errors(plugin: str, doing: str) -> Iterator[None]:
    """Add the plugin's name to a MissingComponent. Turn an exception that is no StartupError into a PluginError."""
    try:
        yield
    except MissingComponent as error:
        raise MissingComponent(f"plugin {plugin!r}: {error}") from None
    except StartupError:
        raise
    except Exception as error:
        raise PluginError(f"plugin {plugin!r} failed in {doing}: {type(error).__name__}: {error}") from error


def _at_start(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return the functions of :func:`_in_order` for a start-up hook, wrapped so that errors name plugin and hook."""
    attribute, wanted = _RESULTS.get(hook, ("__class__", ""))

    def guarded(plugin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @attribute_errors(plugin, hook)
        def call(*arguments: Any) -> Any:
            if not hasattr(result := function(*arguments), attribute):
                raise TypeError(f"returned {result!r}; wanted {wanted}")
            return result

        return call

    return [(plugin, guarded(plugin, function)) for plugin, function in _in_order(manager, hook)]


def _refuse_unknown(manager: pluggy.PluginManager) -> None:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        callers = manager.get_hookcallers(error.plugin) or []
        unknown = [caller.name for caller in callers if not caller.has_spec()]
        cures = "".join(f"; {_REPLACED[name]} replaces {name}" for name in unknown if name in _REPLACED)
        plugin, known = manager.get_name(error.plugin), ", ".join(hook_names())
        raise PluginError(
            f"plugin {plugin!r}: no such hook: {', '.join(unknown)}{cures} (known: {known})"
        ) from None
