"""A router on a free port, in the process of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from router_core.cli import build
from router_core.router import Router
from slime_http.serving import serving

__all__ = ["Running", "started"]

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Running:
    """A router that serves: its object, its base URL, and a client of it."""

    router: Router
    url: str
    client: httpx.AsyncClient


@asynccontextmanager
async def started(*arguments: str, grace_s: float = 5.0) -> AsyncIterator[Running]:
    """Serve a router made of the command line ``arguments``, as ``slime-router`` would, but on a free port.

    At the end, requests in flight have ``grace_s`` seconds to finish. Raises StartupError.
    """
    router, app = build(arguments)
    timeout_s = router.settings.client_timeout_s
    async with (
        serving(app, grace_s=grace_s, client_timeout_s=timeout_s, on_stop=router.stop) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S) as client,
    ):
        yield Running(router, url, client)
