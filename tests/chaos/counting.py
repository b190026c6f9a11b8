"""A plugin for the router under test: what it has under way, as nobody can see from outside."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router_core import Exchange, hookimpl
from router_core.router import Router

__all__ = ["COUNTS_MEMORY", "make_plugin", "used_bytes"]

#: A variable of the router's environment. Python's own allocator would keep what is free, and not tell how much it is.
COUNTS_MEMORY = {"PYTHONMALLOC": "malloc"}


class _Mallinfo(ctypes.Structure):
    """The result of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def used_bytes() -> int:
    """Return the number of bytes that are allocated, in a process with ``COUNTS_MEMORY``.

    Resident memory would be the most that was ever allocated, and holes.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


class _Counting:
    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        async def counts(_: Request) -> Response:
            gc.collect()
            tasks = Counter(_name(task) for task in asyncio.all_tasks())
            exchanges = sum(isinstance(one, Exchange) for one in gc.get_objects())
            return JSONResponse({"tasks": tasks, "exchanges": exchanges, "used_bytes": used_bytes()})

        return [Route("/chaos/counts", counts)]


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def make_plugin(options: argparse.Namespace) -> _Counting:
    return _Counting()
