"""Waiting for calls in threads, such that no thread uses a caller's buffers after the wait has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from anyio import CancelScope

__all__ = ["settled"]


async def settled(calls: Sequence[Future[Any]]) -> None:
    """Return when all calls have ended, with a result or an error.

    A cancellation drops calls that have not begun, and waits for the end of the others. ``anyio.to_thread`` is
    no substitute: if ``Task.cancel`` cancels the task, as ``asyncio.timeout`` does, the ``await`` ends at once, but
    the thread runs on.
    """
    if not calls:
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    left = count(len(calls) - 1, -1)

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def end(_: Future[Any]) -> None:
        if not next(left) and not loop.is_closed():
            loop.call_soon_threadsafe(wake)  # once, for all calls

    for call in calls:
        call.add_done_callback(end)
    try:
        await waiter
    except asyncio.CancelledError:
        for call in calls:
            call.cancel()
        while not all(call.done() for call in calls):
            waiter = loop.create_future()
            with CancelScope(shield=True), suppress(asyncio.CancelledError):
                await waiter
        raise
