"""The component that this plugin offers to others."""

from __future__ import annotations

from typing import Protocol

from router_core.reply import Reply
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["Breaking"]


class Breaking(Protocol):
    """Circuit breakers, for who asks more than one worker; the component ``"breakers"``. Workers are servers."""

    def begin(self, worker: Worker, attempt: Request) -> None:
        """``attempt`` is about to be sent to ``worker``."""
        ...

    def failed(self, worker: Worker, attempt: Request, how: str) -> None:
        """``worker`` has failed ``attempt``, which no connection tells."""
        ...

    def answered(self, worker: Worker, attempt: Request, reply: Reply) -> None:
        """The head of ``reply`` is there; its end is waited for."""
        ...

    def ended(self, worker: Worker, attempt: Request, *, well: bool) -> None:
        """Nothing more comes of ``attempt``. Not ``well``: given up, or what went wrong was told."""
        ...
