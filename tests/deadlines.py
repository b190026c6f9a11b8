"""Deadlines for tests that hang. Tests that do not hang meet these deadlines on any machine."""

from __future__ import annotations

from collections.abc import Callable

import anyio

__all__ = ["HANG_S", "until"]

HANG_S = 100.0


async def until(condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds. Raises TimeoutError if it does not hold within ``HANG_S``."""
    with anyio.fail_after(HANG_S):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event to set
            await anyio.sleep(0.005)
