"""The plugin: it serves the description of the router's routes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import anyio
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router_core import hookimpl
from router_core.router import Router
from slime_openapi.description import described

__all__ = ["OpenAPI", "make_plugin"]


def make_plugin(options: argparse.Namespace) -> OpenAPI:
    """Make the plugin."""
    return OpenAPI()


class OpenAPI:
    """Answers ``GET /openapi.json``. The first request converts the document from YAML to JSON, in a thread."""

    def __init__(self) -> None:
        self._document: bytes | None = None
        self._plugins: Sequence[str] = ()

    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        self._plugins = router.hooks.plugins
        # The description shows nothing of workers, so any user may read it.
        return [Route("/openapi.json", self._answer, methods=["GET"])]

    async def _answer(self, _: Request) -> Response:
        if self._document is None:
            self._document = await anyio.to_thread.run_sync(self._written)
        return Response(self._document, media_type="application/json")

    def _written(self) -> bytes:
        return orjson.dumps(described(self._plugins))
