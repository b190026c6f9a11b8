"""Prefill and decode engines on real sockets, and a router that brings them together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskStatus
from starlette.applications import Starlette

from plugged import until
from router_core.types import ASGIApp
from routers import Start
from slime_engine.app import make_app
from slime_engine.engine import EngineHost
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

__all__ = ["PROMPT", "Front", "Half", "Pairs", "disaggregated", "rows"]

#: An application that is put before an engine.
Front = Callable[[Starlette], ASGIApp]

PROMPT = "<|im_start|>user\nTell me a short story.<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Half:
    """An engine that does one half of each generation. Its bootstrap port is the one that it serves at."""

    url: str
    host: EngineHost
    over: anyio.Event = field(default_factory=anyio.Event)
    closed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def busy(self) -> int:
        """Sequences that it has not ended."""
        engine = self.host.engine_or_none
        assert engine is not None
        scheduler = engine.scheduler
        return len(scheduler.running) + len(scheduler.waiting) + len(scheduler.handing)

    def journal(self, rid: str | None = None) -> list[dict[str, Any]]:
        engine = self.host.engine_or_none
        assert engine is not None
        return [entry.as_json() for entry in engine.journal.entries(rid)]

    async def end(self) -> None:
        """Close its socket, and within a second every connection."""
        self.over.set()
        await self.closed.wait()


@dataclass
class Pairs:
    """A router with its engines."""

    running: Running
    prefills: list[Half]
    decodes: list[Half]

    @property
    def halves(self) -> list[Half]:
        return [*self.prefills, *self.decodes]

    async def generate(self, expect: int = 200, /, **body: Any) -> Any:
        """The answer to ``/generate``, whose status must be ``expect``."""
        answer = await self.running.client.post("/generate", json={"text": PROMPT, **body})
        assert answer.status_code == expect, answer.text
        return answer.json()

    def loads(self) -> list[int]:
        """Requests in flight, by worker."""
        return [worker.load for worker in self.running.router.pool]


async def _serve(
    model: NgramModel, settings: Settings, front: Front | None, *, task_status: TaskStatus[Half]
) -> None:
    app = make_app(settings, lambda: model)
    async with serving(app if front is None else front(app), grace_s=0.1) as url:
        half = Half(url, app.state.host)
        task_status.started(half)
        await half.over.wait()
    half.closed.set()


@asynccontextmanager
async def disaggregated(
    start: Start,
    model: NgramModel,
    *flags: str,
    prefills: int = 1,
    decodes: int = 1,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill_front: Front | None = None,
    decode_front: Front | None = None,
    **both: Any,
) -> AsyncIterator[Pairs]:
    """At the end no lease is left, no connection busy, and no sequence with an engine that still serves."""
    reads = Settings(disaggregation_mode="prefill", **both | (prefill or {}))
    writes = Settings(disaggregation_mode="decode", **both | (decode or {}))
    async with anyio.create_task_group() as engines, AsyncExitStack() as stack:
        first = [await engines.start(partial(_serve, model, reads, prefill_front)) for _ in range(prefills)]
        second = [await engines.start(partial(_serve, model, writes, decode_front)) for _ in range(decodes)]
        for half in (*first, *second):
            stack.callback(half.over.set)
        named = [word for half in first for word in ("--prefill", half.url, str(half.port))]
        named += [word for half in second for word in ("--decode", half.url)]
        running = await stack.enter_async_context(start("--pd-disaggregation", *named, *flags))
        await until(lambda: running.router.pool.healthy == prefills + decodes)
        pairs = Pairs(running, first, second)
        yield pairs
        await until(lambda: not any(pairs.loads()))
        await until(lambda: not running.router.proxy.busy_connections)
        await until(lambda: not any(half.busy for half in pairs.halves if not half.over.is_set()))


def rows(output: dict[str, Any]) -> list[tuple[float, int]]:
    """``(logprob, id)`` of each sampled token; an output that was aborted before it began has none."""
    return [(one[0], one[1]) for one in output["meta_info"].get("output_token_logprobs", ())]
