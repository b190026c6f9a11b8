"""The flags of the limits, spelt as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from router_core import SettingsError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """``max_concurrent_requests`` None: no limit. The queue is for what comes on top of it.

    ``refill_per_s``: slots that come free each second whoever has them, 0: none but those that are given back.
    """

    max_concurrent_requests: int | None = None
    queue_size: int = 100
    queue_timeout_s: float = 60.0
    refill_per_s: int = 0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        limit: int = options.max_concurrent_requests
        if limit != -1 and limit < 1:
            raise SettingsError(
                f"--max-concurrent-requests: wanted 1 or more, or -1 for no limit, got {limit}"
            )
        settings = cls(
            None if limit == -1 else limit,
            options.queue_size,
            options.queue_timeout_secs,
            options.rate_limit_tokens_per_second or 0,
        )
        if settings.queue_size < 0:
            raise SettingsError(f"--queue-size: wanted 0 or more, got {settings.queue_size}")
        if not 0 < settings.queue_timeout_s < math.inf:
            raise SettingsError(
                f"--queue-timeout-secs: wanted a number above 0, got {settings.queue_timeout_s}"
            )
        if settings.refill_per_s < 0:
            raise SettingsError(
                f"--rate-limit-tokens-per-second: wanted 0 or more, got {settings.refill_per_s}"
            )
        return settings
