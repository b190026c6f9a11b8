"""Resources of a router while it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx
from anyio.abc import TaskGroup, TaskStatus

from router_core.client import Watch
from router_core.registration import Registration

__all__ = ["Life", "background"]


@dataclass(slots=True)
class Life:
    """Resources of a router that serves. The lock ``announcing`` is held while plugins learn of a weight version."""

    tasks: TaskGroup
    http: httpx.AsyncClient
    clients: Watch
    registration: Registration
    started: anyio.Event = field(default_factory=anyio.Event)
    stopping: anyio.Event = field(default_factory=anyio.Event)
    announcing: anyio.Lock = field(default_factory=anyio.Lock)


@asynccontextmanager
async def background() -> AsyncIterator[tuple[TaskGroup, Callable[[], Awaitable[None]]]]:
    """Open a task group for background work. Yield the group, and a function that cancels it and waits for its end.

    Call the function before closing resources that the work uses. An exception that leaves a task ends the block.
    """
    async with anyio.create_task_group() as whole:
        ended = anyio.Event()
        tasks = await whole.start(_host, ended)

        async def end() -> None:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await ended.wait()

        yield tasks, end
        whole.cancel_scope.cancel()


async def _host(ended: anyio.Event, *, task_status: TaskStatus[TaskGroup]) -> None:
    """Hold a task group open in a separate task, so that the group can end before the block of :func:`background`."""
    try:
        async with anyio.create_task_group() as tasks:
            task_status.started(tasks)
            await anyio.sleep_forever()
    finally:
        ended.set()
