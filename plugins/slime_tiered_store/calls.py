"""Calls for many items, at most ``AT_ONCE`` of them at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from slime_tiered_store.errors import StoreError

__all__ = ["AT_ONCE", "all_of"]

_T = TypeVar("_T")
#: The largest number of calls that run at the same time.
AT_ONCE = 64


async def all_of(call: Callable[[_T], Awaitable[None]], items: Sequence[_T]) -> None:
    """Call ``call`` for each of ``items``. Raises the first StoreError after all calls have ended."""
    errors: list[StoreError] = []
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def one(item: _T) -> None:
        async with limiter:
            try:
                await call(item)
            except StoreError as error:
                errors.append(error)

    async with anyio.create_task_group() as tasks:
        for item in items:
            tasks.start_soon(one, item)
    if errors:
        raise errors[0]
