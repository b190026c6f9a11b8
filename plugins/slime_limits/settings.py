"""The flags of the limits, with the names that the SGLang gateway uses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core import SettingsError
from router_core.flags import flag, read_flags

__all__ = ["QUEUE_POLICIES", "Settings"]

#: Orders of the queue, with the names that they have in SGLang's ``--schedule-policy``.
QUEUE_POLICIES = ("fcfs", "lof")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin. ``max_concurrent_requests`` -1: no limit. Up to ``queue_size`` requests beyond it wait.

    ``refill_per_s``: tokens added to the bucket each second. None or 0: only a request that ends frees a slot.
    """

    max_concurrent_requests: int = flag(
        "--max-concurrent-requests", default=-1, metavar="N",
        help="generations under way at once, -1: no limit",
    )  # fmt: skip
    queue_size: int = flag(
        "--queue-size", default=100, at_least=0, metavar="N",
        help="requests that may wait for a free slot of --max-concurrent-requests, 0: none",
    )  # fmt: skip
    queue_timeout_s: float = flag(
        "--queue-timeout-secs", default=60.0, above=0, metavar="S", help="longest wait for a free slot"
    )
    refill_per_s: int | None = flag(
        "--rate-limit-tokens-per-second", type=int, at_least=0, metavar="N",
        help="make --max-concurrent-requests a token bucket, refilled with N tokens a second (default: 0)",
    )  # fmt: skip
    queue_policy: str = flag(
        "--queue-policy", choices=QUEUE_POLICIES, default="fcfs",
        help="order of the queue: first come, first served (fcfs), or by priority, then longest output first (lof)",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = read_flags(cls, options)
        limit = settings.max_concurrent_requests
        if limit != -1 and limit < 1:
            raise SettingsError(
                f"--max-concurrent-requests: wanted 1 or more, or -1 for no limit, got {limit}"
            )
        return settings
