"""A policy for workers of different sizes: each gets requests in proportion to its label ``weight``."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router_core import Exchange, Worker


class Weighted:
    """Chooses the worker that would have the fewest requests per unit of weight; ties are broken at random."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return min(workers, key=lambda worker: ((worker.load + 1) / weight(worker), random.random()))


def weight(worker: Worker) -> float:
    """Return the label ``weight`` of the worker; 1 if it is not a number above 0."""
    try:
        found = float(worker.server.labels.get("weight", "1"))
    except ValueError:
        return 1.0
    return found if found > 0 else 1.0
