"""The plugins that own modules, to name a plugin whose code raised an exception."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType

__all__ = ["SHIPPED", "Owners"]

_CORE = "router_core"
#: The packages that ship with the router. Another author's package may begin with ``slime_`` too.
SHIPPED = frozenset(
    (
        "slime_access_log", "slime_auth", "slime_control", "slime_dashboard", "slime_demo", "slime_engine",
        "slime_fairness", "slime_health", "slime_http", "slime_journal", "slime_kubernetes", "slime_limits",
        "slime_logging", "slime_metrics", "slime_models", "slime_openai", "slime_openapi", "slime_otel",
        "slime_pd", "slime_policies", "slime_r3", "slime_radix_cache", "slime_resume", "slime_retries",
        "slime_rows", "slime_sessions", "slime_sglang", "slime_start", "slime_state", "slime_testing",
        "slime_tiered_store", "slime_top",
    )
)  # fmt: skip
#: Modules that take the messages of middleware and check them. If middleware sends a wrong message, each layer outside
#: of that middleware passes the message on before the check.
_CHECK_MESSAGES = ("slime_http.response_head", "slime_http.server_request", "router_core.request_ids")
#: For a function, or for all functions of a module (None): the hook whose code such a function calls.
_CALLERS = {
    ("router_core.hooks", "call_pre_request"): "pre_request",
    ("router_core.hooks", "call_post_response"): "post_response",
    ("router_core.hooks", "select_worker"): "select_worker",
    ("router_core.router", "respond"): "sender",
    ("router_core.router", "ask_again"): "sender",
    ("router_core.reply", None): "post_response",  # which adds taps, and replaces bodies
    ("starlette.routing", None): "routes",
    ("starlette.responses", None): "routes",
    # These call the application, receive and send, each through the layers of middleware.
    ("starlette.middleware.errors", "_send"): "asgi_middleware",
    ("router_core.app", "counted"): "asgi_middleware",
    ("router_core.client", None): "asgi_middleware",
    ("router_core.proxy", "relay"): "asgi_middleware",
    ("router_core.proxy", "stream"): "asgi_middleware",
}


class Owners:
    """The names of plugins by module and by top-level package.

    A module or package that two plugins share has no owner: neither is named for the other's mistake.
    """

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}
        #: The names of plugins that do not ship with the router.
        self.foreign: set[str] = set()

    def add(self, name: str, plugin: object) -> None:
        """Add the plugin ``name``: a module, a class or an object."""
        found = plugin if isinstance(plugin, ModuleType | type) else type(plugin)
        module: str = found.__name__ if isinstance(found, ModuleType) else found.__module__
        package = module.partition(".")[0]
        if package not in SHIPPED:
            self.foreign.add(name)
        if package != _CORE and package not in sys.stdlib_module_names:
            for each in {module, package}:
                self._names[each] = name if self._names.get(each, name) == name else None

    def culprit(
        self, error: BaseException, unsendable: type[BaseException] | tuple[()] = (), endpoint: object = None
    ) -> tuple[str, str] | None:
        """Return the plugin that raised ``error``, and its hook with the function; None: unknown.

        The search goes from the innermost frame outwards, to the first frame of a plugin. It ends at a coroutine of the
        core, since the plugins outside of that coroutine only wait for it. It does not end at a plain function of the
        core: a plugin may have called that function with a wrong argument.

        A message that the server refuses has passed through several layers, and any of them may have spoilt it. So the
        search goes on after the first plugin, leaves out plugins that ship with the router, and returns "a or b" as the
        name. The same holds for a request that cannot be sent, but this search goes on beyond coroutines of the core,
        to the layers of ``sender``. ``unsendable``: the type of the error for such a request.
        Of a group of errors, the first one counts.
        If no frame is a plugin's, the plugin of ``endpoint``, a route's function, is to blame: it returned no Response.
        """
        frames = _frames(error.__traceback__)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
            frames += _frames(error.__traceback__)
        found: dict[str, str] = {}
        is_refused = is_request = isinstance(error, unsendable)
        for place, (module, code) in reversed([*enumerate(frames)]):
            package = module.partition(".")[0]
            owner = self._owner(module)
            is_refused |= module in _CHECK_MESSAGES
            if is_refused and package in SHIPPED:
                continue  # the layers that ship with the router pass on what they got
            if owner is not None:
                found.setdefault(owner, f"{_hook(frames[:place])} ({_short(code.co_qualname)})")
                if not is_refused:
                    break
            elif package == _CORE and code.co_flags & inspect.CO_COROUTINE and not is_request:
                break
        if not found and (owner := self._owner(getattr(endpoint, "__module__", ""))) is not None:
            found[owner] = (
                f"routes ({_short(getattr(endpoint, '__qualname__', type(endpoint).__qualname__))})"
            )
        return (" or ".join(found), next(iter(found.values()))) if found else None

    def _owner(self, module: str) -> str | None:
        return self._names.get(module) or self._names.get(module.partition(".")[0])


def _short(qualified: str) -> str:
    """Return the name of a function without the functions around it, but with its class."""
    return qualified.rpartition("<locals>.")[2]


def _hook(callers: Sequence[tuple[str, CodeType]]) -> str:
    """Return the hook by which the router got the function that ``callers`` (frames, the outermost first) call."""
    for module, code in callers[::-1]:
        hook = _CALLERS.get((module, code.co_name)) or _CALLERS.get((module, None))
        if hook is not None:
            return hook
    return "asgi_middleware"  # outside of the application


def _frames(trace: TracebackType | None) -> list[tuple[str, CodeType]]:
    """Return the module and the code of each frame, the outermost first."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code))
        trace = trace.tb_next
    return found
