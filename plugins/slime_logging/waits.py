"""Waits of requests, reported to the request log and to the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, Protocol, TypeAlias

__all__ = ["Wait", "Waits"]

#: Reasons why a request waits: for a slot, for the end of a pause, or between two attempts.
Wait: TypeAlias = Literal["queue", "pause", "retry"]


class _Counting(Protocol):
    def waiting(self, why: Wait) -> AbstractContextManager[None]:
        """Count the duration of the block."""
        ...


class Waits:
    """Tells the request log and the metrics how long the request of the current task waits.

    ``find`` returns the component of a name, or None. Make an instance in ``setup`` or later, when the
    components of the log and the metrics are registered.
    """

    def __init__(self, find: Callable[[str], _Counting | None] = lambda name: None) -> None:
        self._counting = [each for name in ("request_log", "wait_times") if (each := find(name)) is not None]

    @contextmanager
    def during(self, why: Wait) -> Iterator[None]:
        """Count the duration of the block as a wait."""
        with ExitStack() as stack:
            for each in self._counting:
                stack.enter_context(each.waiting(why))
            yield
