"""Prefill and decode workers whose every answer a test decides, byte by byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import orjson

from core.servers import Arrived, Wire, answer, scripted
from plugged import until
from router_core import Worker
from router_core.workers import WorkerType
from routers import Start
from slime_testing import Running

__all__ = ["DROP", "HANG", "StandIn", "between", "refusal", "said", "stream"]

#: Acts of a worker in place of an answer: hang up, say nothing.
DROP, HANG = b"drop", b"hang"
_JSON = b"Content-Type: application/json"


def said(**meta: Any) -> bytes:
    """A whole answer to ``/generate``."""
    return answer(orjson.dumps({"text": "x", "meta_info": meta}), _JSON)


def stream(*events: Any) -> bytes:
    """A streamed one."""
    data = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"
    return answer(data, b"Content-Type: text/event-stream")


def refusal(status: int) -> bytes:
    return answer(b'{"no":%d}' % status, b"X-Mine: yes", status=b"%d No" % status)


class StandIn:
    """Answers each generation as the next of ``moods`` says, those after them as ``rest`` does."""

    def __init__(self, kind: WorkerType, *moods: bytes, rest: bytes = said()) -> None:
        self.kind = kind
        self.moods = list(moods)
        self.rest = rest
        self.abort_takes_s = 0.0
        self.generations: list[Arrived] = []
        self.others: list[Arrived] = []
        self.aborted: list[str] = []
        self.worker: Worker

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [orjson.loads(request.body) for request in self.generations]

    async def serve(self, wire: Wire) -> None:
        while request := await wire.request():
            if request.line.startswith(b"POST /abort_request "):
                self.aborted.append(orjson.loads(request.body)["rid"])
                await anyio.sleep(self.abort_takes_s)
                await wire.send(answer(b""))
            elif not request.line.startswith((b"POST /generate", b"POST /v1/")):
                self.others.append(request)
                await wire.send(answer(b"{}"))
            else:
                self.generations.append(request)
                mood = self.moods.pop(0) if self.moods else self.rest
                if mood == DROP:
                    return
                if mood == HANG:
                    await wire.until_closed()
                    return
                await wire.send(mood)


@asynccontextmanager
async def between(start: Start, *workers: StandIn, flags: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    """A router with ``workers``, in a hurry. At the end no lease is left and no connection busy."""
    hurry: tuple[str, ...] = ("--retry-initial-backoff-ms", "1", "--disable-health-check")
    if "--no-default-plugins" in flags:
        hurry = ()
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(start("--pd-disaggregation", *hurry, *flags))
        for number, each in enumerate(workers):
            server = await stack.enter_async_context(scripted(each.serve))
            about: dict[str, Any] = {"worker_type": each.kind}
            if each.kind == "prefill":
                about["bootstrap_port"] = 9000 + number
            told = await running.client.post("/workers", json={"url": server.url, **about})
            assert told.status_code == 202
            each.worker = running.router.pool.find(told.json()["worker_id"])
        yield running
        await until(lambda: not any(worker.load for worker in running.router.pool))
        await until(lambda: not running.router.proxy.busy_connections)
