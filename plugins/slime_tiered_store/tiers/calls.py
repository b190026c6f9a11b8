"""Waiting for calls in threads, such that no thread uses a caller's buffers after the wait has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from anyio import CancelScope

__all__ = ["settled"]


async def settled(calls: Sequence[Future[Any]]) -> None:
    """Return when all calls have ended, with a result or an error.

    A cancellation drops calls that have not begun, and waits for the end of the others. ``anyio.to_thread`` is
    no substitute: if ``Task.cancel`` cancels the task, as ``asyncio.timeout`` does, the call ends at once, but the
    thread runs on.
    """
    if not calls:
        return
    waiting = [asyncio.wrap_future(call) for call in calls]
    try:
        await asyncio.wait(waiting)
    except asyncio.CancelledError:
        for call in calls:
            call.cancel()
        while not all(each.done() for each in waiting):
            with CancelScope(shield=True), suppress(asyncio.CancelledError):
                await asyncio.wait(waiting)
        raise
    finally:
        for each in waiting:
            if each.done() and not each.cancelled():
                each.exception()  # else asyncio would log it; the caller finds the error in ``calls``
