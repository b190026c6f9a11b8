"""The routes at which the metrics are scraped."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core import SettingsError
from router_core.routes import ControlRoute
from slime_http.serving import serving
from slime_metrics.registry import Metrics

__all__ = ["Exposition"]

logger = logging.getLogger(__name__)


class Exposition:
    """Answers scrapes, in the text format of Prometheus or in OpenMetrics, as the scraper asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def route(self) -> ControlRoute:
        """Return the router's route. The metrics name the workers, so this route needs the same key as ``/workers``."""
        return ControlRoute("/metrics", self._answer, methods=["GET"])

    async def _answer(self, request: Request) -> Response:
        families = self._metrics.collect()
        # Writing the text of a large fleet takes long. In a thread it does not hold up requests.
        text, media_type = await anyio.to_thread.run_sync(
            self._metrics.written, families, request.headers.get("accept", "")
        )
        return Response(text, headers={"content-type": media_type})

    @asynccontextmanager
    async def on(self, host: str, port: int) -> AsyncIterator[None]:
        """Serve the metrics on ``host:port``, without a key. Raises SettingsError when the address cannot be used."""
        app = Starlette(routes=[Route("/metrics", self._answer)])
        try:
            async with serving(app, host=host, port=port, grace_s=1, level=logging.DEBUG) as url:
                logger.info("metrics at %s/metrics", url)
                yield
        except OSError as error:
            reason = f"{error.strerror or error}; give another --prometheus-port or --prometheus-host"
            raise SettingsError(f"metrics cannot listen on {host}:{port}: {reason}") from None
