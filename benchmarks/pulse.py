"""Lateness of the router's event loop, measured in the router by a plugin for ``--middleware-paths``.

A tick is due every millisecond. Its lateness is the time from then until the loop runs it. A chunk that arrived at the
moment of the tick would have waited as long. All ticks that are due during a stall count, each with its own wait: one
stall of 20 ms is twenty late ticks, not one. An idle loop is late by the precision of uvloop's timers, a millisecond or
two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from benchmarks.peers import Running
from benchmarks.processes import PROXY_CORE, CoreClock
from benchmarks.report import Column
from benchmarks.streams import quantile_us
from router_core import hookimpl

__all__ = ["COLUMNS", "Felt", "Pulse", "feel", "make_plugin"]

_TICK_S = 0.001
_TICK_NS = 1_000_000
_LONG_NS = 20 * _TICK_NS
_PATH = "/pulse"

COLUMNS = (
    Column("stall_p50_ms", "stall p50 ms", 1),
    Column("stall_p99_ms", "p99", 1),
    Column("stall_p999_ms", "p99.9", 1),
    Column("stall_max_ms", "max", 1),
    Column("over_20_ms", "ticks over 20 ms"),
    Column("collector_ms", "longest gc ms", 1),
    Column("own", "router's own %"),
    Column("core", "its core %"),
)


def make_plugin(options: argparse.Namespace) -> Pulse:
    return Pulse()


class Pulse:
    """``GET /pulse``: the lateness of each tick since the previous call, and the time of each garbage collection."""

    def __init__(self) -> None:
        self._late_ns = array("q")
        self._collections_ns = array("q")
        self._due_ns = self._collecting_since_ns = 0

    @hookimpl
    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self._begin()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            self._timer.cancel()

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        async def pulse(_: Request) -> Response:
            body = orjson.dumps(
                {"late_ns": self._late_ns.tolist(), "collections_ns": self._collections_ns.tolist()}
            )
            self._begin()  # the time for writing the answer does not count
            return Response(body, media_type="application/json")

        return [Route(_PATH, pulse)]

    def _begin(self) -> None:
        self._late_ns, self._collections_ns = array("q"), array("q")
        self._due_ns = monotonic_ns() + _TICK_NS

    def _tick(self) -> None:
        now = monotonic_ns()
        while self._due_ns <= now:
            self._late_ns.append(now - self._due_ns)
            self._due_ns += _TICK_NS
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _collected(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting_since_ns = monotonic_ns()
        else:
            self._collections_ns.append(monotonic_ns() - self._collecting_since_ns)


@dataclass(slots=True)
class Felt:
    """Measurements made while a block ran, filled in at its end.

    ``own``: the share of its core that the router used, 0 to 1. ``core``: the share that all processes used.
    """

    seconds: float = 0.0
    late_ns: list[int] = field(default_factory=list)
    collections_ns: list[int] = field(default_factory=list)
    own: float = 0.0
    core: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return the figures of ``COLUMNS``."""
        late = self.late_ns
        return {
            "stall_p50_ms": quantile_us(late, 0.5) / 1e3,
            "stall_p99_ms": quantile_us(late, 0.99) / 1e3,
            "stall_p999_ms": quantile_us(late, 0.999) / 1e3,
            "stall_max_ms": max(late) / 1e6,
            "over_20_ms": sum(one > _LONG_NS for one in late),
            "collector_ms": max(self.collections_ns, default=0) / 1e6,
            "own": self.own * 100,
            "core": self.core * 100,
        }


@asynccontextmanager
async def feel(router: Running) -> AsyncIterator[Felt]:
    """Measure ``router``, which has the plugin, while the block runs."""
    felt = Felt()
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        await client.get(_PATH)
        cores, cpu_s, began = CoreClock(), router.cpu_s(), monotonic()
        yield felt
        felt.seconds = monotonic() - began
        felt.own = (router.cpu_s() - cpu_s) / felt.seconds
        felt.core = cores.busy()[PROXY_CORE]
        told = (await client.get(_PATH)).raise_for_status().json()
    felt.late_ns, felt.collections_ns = told["late_ns"], told["collections_ns"]
