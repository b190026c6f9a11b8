"""A plugin for the router under test: what it has under way, as nobody can see from outside."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router_core import Exchange, hookimpl
from router_core.router import Router

__all__ = ["make_plugin"]


class _Counting:
    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        async def counts(_: Request) -> Response:
            gc.collect()
            tasks = Counter(_name(task) for task in asyncio.all_tasks())
            exchanges = sum(isinstance(one, Exchange) for one in gc.get_objects())
            return JSONResponse({"tasks": tasks, "exchanges": exchanges})

        return [Route("/chaos/counts", counts)]


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def make_plugin(options: argparse.Namespace) -> _Counting:
    return _Counting()
