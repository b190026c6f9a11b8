"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router_core.workers import Worker

__all__ = ["Policy"]


class Policy(Protocol):
    """Chooses among the workers that can be used now. Called between two awaits, so it must not block."""

    def __call__(self, workers: Sequence[Worker]) -> Worker:
        """One of ``workers``, which are never empty and may differ from call to call."""
        ...
