"""Ends on the engines what nobody waits for any more."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from contextlib import suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from router_core import Worker
from router_core.exchange import Request
from router_core.router import Router

__all__ = ["Ending"]

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0
#: A worker that answers none of them must not take the connections of the others.
_AT_ONCE = 64
_MAX_ANSWER_BYTES = 1 << 16


class Ending:
    """Aborts by rid, on the connections that traffic has opened: a thousand clients may leave at once.

    :meth:`end` may be called in a callback of a connection, where no task can be started; :meth:`run` is the task.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._unwanted, self._to_end = anyio.create_memory_object_stream[tuple[Worker, str]](math.inf)
        self._limits: dict[str, anyio.CapacityLimiter] = defaultdict(lambda: anyio.CapacityLimiter(_AT_ONCE))

    def end(self, worker: Worker, rid: str) -> None:
        """``worker`` is to end what begins with ``rid``. Returns at once."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the router ends
            self._unwanted.send_nowait((worker, rid))

    async def run(self) -> None:
        """Do so until cancelled."""
        unwanted: MemoryObjectReceiveStream[tuple[Worker, str]] = self._to_end
        with self._unwanted, unwanted:
            async with anyio.create_task_group() as tasks:
                async for worker, rid in unwanted:
                    tasks.start_soon(self._abort, worker, rid)

    async def _abort(self, worker: Worker, rid: str) -> None:
        """What comes of it is only told to the log: whoever asked has gone."""
        request = Request("POST", b"/abort_request", [(b"content-type", b"application/json")])
        request.replace_json({"rid": rid})
        try:
            with anyio.fail_after(_DEADLINE_S):
                async with self._limits[worker.url]:
                    reply = await self._router.proxy.ask(worker, request)
                    try:
                        await reply.read(_MAX_ANSWER_BYTES)
                    finally:
                        reply.close()
        except Exception as error:
            logger.info("worker %s was not told to abort a request: %s", worker.url, type(error).__name__)
