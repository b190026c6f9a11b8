"""Tasks that run while a block of code runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["side_tasks"]


@asynccontextmanager
async def side_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group whose tasks are cancelled at the end of the block. The block's error is raised as it is."""
    failed: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # the group would wrap it
            failed = error
        tasks.cancel_scope.cancel()
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # the error's traceback refers to this frame
