"""slime-router's core: workers, requests and hooks. It imports no plugin.

A plugin needs little more than :data:`hookimpl`, :class:`Exchange` and :class:`Reply`. Read
``router_core.hookspecs`` first.
"""

from router_core.errors import BadRequest, HTTPError, RouterError, SettingsError, StartupError
from router_core.exchange import Exchange
from router_core.hookspecs import hookimpl
from router_core.reply import Reply, Tap
from router_core.request import Request
from router_core.weights import WeightUpdate
from router_core.workers import Worker

__all__ = [
    "BadRequest",
    "Exchange",
    "HTTPError",
    "Reply",
    "Request",
    "RouterError",
    "SettingsError",
    "StartupError",
    "Tap",
    "WeightUpdate",
    "Worker",
    "hookimpl",
]
