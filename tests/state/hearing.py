"""Answers that were heard, counted, for a test that waits for some more of them."""

from __future__ import annotations

import anyio

__all__ = ["HeardAnswers"]


class HeardAnswers:
    """Counts answers."""

    def __init__(self) -> None:
        self._count = 0
        self._another = anyio.Event()

    def add(self) -> None:
        """One more was heard."""
        self._count += 1
        self._another.set()

    async def more(self, answers: int) -> None:
        """Wait until that many more were heard."""
        enough = self._count + answers
        while self._count < enough:
            self._another = anyio.Event()
            await self._another.wait()
