"""Rows of the tokens of an answer, such as routed experts, before they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["FoundRows", "Rows"]


class FoundRows(Protocol):
    """Known rows, ready to be read. ``shape``: ``[tokens, layers, top_k]`` or ``[tokens, row size]``.

    ``dtype``: a type that holds all values.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]: ...

    def held(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the rows, even if their turns are forgotten meanwhile."""

    async def check(self) -> str | None:
        """Return the reason if rows are known to be lost, else None. Raises HTTPError.

        Reads only rows that seem to be lost.
        """

    async def stream(self, take: Callable[[npt.NDArray[np.integer[Any]]], Awaitable[None]]) -> str | None:
        """Call ``take`` with consecutive rows ``[some, row size]``, about 1 MiB at a time. Raises HTTPError.

        Returns the reason if the next rows are lost, and None after the last row. ``take`` must not change the rows.
        The rows of one call may have a narrower type than ``dtype``. While ``take`` runs, the next rows are read.
        """


@dataclass(slots=True, eq=False)
class Rows:
    """The rows ``name`` of the tokens of one answer. They are never padded, and read only when they are sent.

    ``found`` is None if they are not known; then ``reason`` says why.
    """

    name: str
    found: FoundRows | None
    reason: str | None

    @classmethod
    def of(cls, name: str, found: FoundRows | str) -> Self:
        """Return known rows, or rows that are not known: then ``found`` is the reason."""
        return cls(name, None, found) if isinstance(found, str) else cls(name, found, None)

    def lose(self, reason: str) -> None:
        """Note that the rows are lost. Call this before anything of the answer is sent."""
        self.found, self.reason = None, reason
