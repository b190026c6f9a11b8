"""What every test may use: the event loop's kind, and routers on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import HealthCheck, settings

from own_time import OWN_TIME, Backend
from router_core.cli import build
from router_core.serving import serving
from routers import Running, Start

# How long an example takes says nothing on a busy machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def anyio_backend() -> Backend:
    """A loop whose clock stands still while the machine does other work."""
    return OWN_TIME


@pytest.fixture
def start() -> Start:
    """``async with start("--plugin", ...) as running:`` serves a router on a free port, as its command line would."""

    @asynccontextmanager
    async def started(*arguments: str, grace_s: float = 5.0) -> AsyncIterator[Running]:
        router, app = build(arguments)
        async with (
            serving(
                app,
                grace_s=grace_s,
                client_timeout_s=router.settings.client_timeout_s,
                on_stop=router.stop,
            ) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
        ):
            yield Running(router, url, client)

    return started
