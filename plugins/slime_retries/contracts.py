"""The component that this plugin offers to others."""

from __future__ import annotations

from typing import Protocol

from router_core.reply import Reply
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["Breaking"]


class Breaking(Protocol):
    """Circuit breakers of servers (not ranks), for plugins that ask several workers; the component ``"breakers"``."""

    def begin(self, worker: Worker, attempt: Request) -> None:
        """Note that ``attempt`` is about to be sent to ``worker``."""
        ...

    def failed(self, worker: Worker, attempt: Request, how: str) -> None:
        """Note a failure of ``attempt`` at ``worker`` that the hook ``attempt_failed`` does not report."""
        ...

    def answered(self, worker: Worker, attempt: Request, reply: Reply) -> None:
        """Note the head of ``reply``; its end is counted by a tap."""
        ...

    def ended(self, worker: Worker, attempt: Request, *, well: bool) -> None:
        """Note the end of ``attempt``. ``well`` is False if it was given up, or its failure was counted before."""
        ...
