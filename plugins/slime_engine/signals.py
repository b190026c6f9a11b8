"""Waiting for a condition on state that only changes between awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Signal"]


class Signal:
    """A condition variable: ``notify`` after a change of the state, ``wait_for`` to wait for one.

    For one event loop: a condition that has come true still holds when ``wait_for`` returns.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until the next ``notify``."""
        await self._event.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.wait()
