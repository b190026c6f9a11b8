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
    """Resources of a router that serves; ``announcing``: a version of the weights is told to the plugins."""

    tasks: TaskGroup
    http: httpx.AsyncClient
    clients: Watch
    registration: Registration
    started: anyio.Event = field(default_factory=anyio.Event)
    stopping: anyio.Event = field(default_factory=anyio.Event)
    announcing: anyio.Lock = field(default_factory=anyio.Lock)


@asynccontextmanager
async def background() -> AsyncIterator[tuple[TaskGroup, Callable[[], Awaitable[None]]]]:
    """A task group for background work, and the function that cancels it and waits until it has ended.

    Call it before closing whatever the work uses. An exception of the work ends the block, too.
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
    """A task group in a task of its own, so that it can be ended before the context that it was opened in."""
    try:
        async with anyio.create_task_group() as tasks:
            task_status.started(tasks)
            await anyio.sleep_forever()
    finally:
        ended.set()
