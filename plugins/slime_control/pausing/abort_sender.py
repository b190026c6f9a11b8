"""Sends aborts to engines, for requests whose answer nobody will read."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import anyio

from router_core import Worker
from router_core.request import Request
from router_core.router import Router

__all__ = ["AbortSender"]

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0
_SETTLED_S = 2.0
#: Largest number of aborts in flight at a worker: a worker that does not answer must not take all connections.
_AT_ONCE = 64
_MAX_ANSWER_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Abort:
    worker: Worker
    rid: str
    over: anyio.Event = field(default_factory=anyio.Event)


class AbortSender:
    """Sends aborts over the proxy's pooled connections, since a thousand clients may disconnect at once.

    :meth:`end` only queues an abort, since a callback of a connection cannot start a task. :meth:`run` sends it.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._aborts_in, self._aborts_out = anyio.create_memory_object_stream[_Abort](math.inf)
        self._under_way: dict[Worker, set[_Abort]] = defaultdict(set)
        #: Ids of workers whose last abort failed. The log names each once, until it answers an abort again.
        self._silent: set[str] = set()
        #: Limiters by the worker's URL. A limiter is dropped with the last abort that uses it.
        self._limits: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()

    def end(self, worker: Worker, rid: str) -> None:
        """Abort the requests at ``worker`` whose rid begins with ``rid``. Returns at once."""
        abort = _Abort(worker, rid)
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the router is shutting down
            self._aborts_in.send_nowait(abort)
            self._under_way[worker].add(abort)

    async def settled(self, worker: Worker) -> None:
        """Return when the aborts pending now at ``worker`` were answered or have failed, or after two seconds.

        A late abort would end a new request with the same rid.
        """
        with anyio.move_on_after(_SETTLED_S):
            for abort in list(self._under_way.get(worker, ())):
                await abort.over.wait()

    async def run(self) -> None:
        """Send aborts until cancelled."""
        async with anyio.create_task_group() as tasks:
            async for abort in self._aborts_out:
                tasks.start_soon(self._send, abort)

    def close(self) -> None:
        """Accept no more aborts."""
        self._aborts_in.close()
        self._aborts_out.close()

    async def _send(self, abort: _Abort) -> None:
        """Send an abort to its worker. A failure is only logged: nobody waits for the answer."""
        worker = abort.worker
        request = Request("POST", b"/abort_request", [(b"content-type", b"application/json")])
        request.replace_json({"rid": abort.rid})
        try:
            with anyio.fail_after(_DEADLINE_S):
                async with self._limits.setdefault(worker.url, anyio.CapacityLimiter(_AT_ONCE)):
                    reply = await self._router.proxy.ask(worker, request)
                    try:
                        await reply.read(_MAX_ANSWER_BYTES)
                    finally:
                        reply.close()
            self._silent.discard(worker.id)
        except Exception as error:
            level = logging.DEBUG if worker.id in self._silent else logging.INFO
            self._silent &= {each.id for each in self._router.pool}  # forgets workers that left
            self._silent.add(worker.id)
            logger.log(level, "worker %s did not answer an abort: %s", worker.url, type(error).__name__)
        finally:
            abort.over.set()
            self._under_way[worker].discard(abort)
            if not self._under_way[worker]:
                del self._under_way[worker]
