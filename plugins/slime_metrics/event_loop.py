"""The lag of the event loop: how late it calls what is due."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from slime_metrics.histogram import Histogram

__all__ = ["LAG_BUCKETS", "watch_lag"]

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_INTERVAL_S = 0.5


async def watch_lag(lag: Histogram, each: Callable[[], object]) -> None:
    """Add the event loop's present lag to ``lag`` twice a second, without end. ``each`` is called each time."""
    while True:
        due = anyio.current_time() + _INTERVAL_S
        await anyio.sleep(_INTERVAL_S)
        lag.observe(max(0.0, anyio.current_time() - due))
        each()
