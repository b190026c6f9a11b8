"""A condition variable for state that changes only between awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Signal"]


class Signal:
    """A condition variable for one event loop: call ``notify`` after a change of the state.

    The condition still holds when ``wait_for`` returns.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait until the next ``notify``."""
        await self._event.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.wait()
