"""Runs long work in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import to_thread

__all__ = ["is_long", "run_work"]

T = TypeVar("T")

#: Copying or hashing this many bytes takes about as long as a switch to a thread and back.
_LONG_BYTES = 1 << 20


def is_long(num_bytes: int) -> bool:
    """Return True if work on this many bytes would hold up the event loop."""
    return num_bytes >= _LONG_BYTES


async def run_work(num_bytes: int, work: Callable[[], T]) -> T:
    """Call ``work``, which copies or hashes ``num_bytes`` bytes: in a thread if that takes long."""
    return await to_thread.run_sync(work) if is_long(num_bytes) else work()
