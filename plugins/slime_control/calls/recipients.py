"""Recipients of a control call, and the body that each gets."""

from __future__ import annotations

import anyio

from router_core import Worker
from router_core.errors import WorkerBroke
from router_core.pool import WorkerPool
from router_core.request import Request
from slime_control.calls.bodies import base_offset, given_bodies, offset_bodies
from slime_control.calls.endpoints import Call
from slime_control.calls.fan_out import FanOut
from slime_control.pausing.under_way import UnderWay
from slime_sglang.aborts import abort_prefix

__all__ = ["Recipients"]


class Recipients:
    """Chooses recipients: all workers, the workers that a body names, or the workers of the requests to abort."""

    def __init__(self, pool: WorkerPool, fan_out: FanOut, under_way: UnderWay) -> None:
        self._pool = pool
        self._fan_out = fan_out
        self._under_way = under_way

    async def bodies(self, call: Call, request: Request) -> dict[Worker, bytes]:
        """Return the body for each recipient, before any is called. Raises BadRequest, WorkerNotFound, WorkerBroke."""
        if call.path == "/abort_request":
            prefix = abort_prefix(request)
            workers = self._under_way.workers(prefix) if prefix else None
            if workers:  # removed workers, too: their requests in flight go on
                return dict.fromkeys(workers, request.body)
        return await self._of_all(call, request)

    async def _of_all(self, call: Call, request: Request) -> dict[Worker, bytes]:
        pool = self._pool
        given = given_bodies(request, pool)
        if given is not None:
            return given
        workers = list(pool)
        if (
            call.path == "/init_weights_update_group"
            and len(workers) > 1
            and base_offset(request) is not None
        ):
            return offset_bodies(request.json(), await self._sizes(workers))
        return dict.fromkeys(workers, request.body)  # all share one buffer

    async def _sizes(self, workers: list[Worker]) -> list[tuple[Worker, int]]:
        """Ask each of ``workers`` for its number of tensor-parallel ranks. Return the numbers. Raises WorkerBroke."""
        sizes: dict[Worker, object] = {}

        async def ask(worker: Worker) -> None:
            about = await self._fan_out.question(worker, b"/server_info", b"/get_server_info")
            sizes[worker] = about.get("tp_size")

        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(ask, worker)
        found = []
        for worker in workers:
            size = sizes[worker]
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise WorkerBroke(
                    f"worker {worker.url} does not say its tp_size, so the ranks cannot be counted; no worker "
                    'was called. Remove the worker, or give each worker its own body: {"workers": {url: body}}'
                )
            found.append((worker, size))
        return found
