"""Policy that chooses at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router_core import Exchange, Worker

__all__ = ["RandomChoice"]


class RandomChoice:
    """Chooses each worker with the same chance."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return random.choice(workers)
