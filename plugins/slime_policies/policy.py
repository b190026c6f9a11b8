"""Protocols of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from router_core import Exchange, Worker

__all__ = ["Policy", "Remembering"]


class Policy(Protocol):
    """Chooses among the workers that can be used now. Called between two awaits, so it must not block."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        """One of ``workers`` for ``exchange``; they are never empty and may differ from call to call."""
        ...


@runtime_checkable
class Remembering(Policy, Protocol):
    """A policy that believes something about workers, such as what is in their caches, and can be told better."""

    def forget(self, worker: Worker) -> None:
        """``worker`` came, went, or may have been restarted: what it held is gone."""
        ...

    def forget_all(self) -> None:
        """The fleet has new weights: no worker holds anything any more."""
        ...
