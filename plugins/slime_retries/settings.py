"""The flags of retries and breakers, with the names and defaults of the SGLang gateway."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from router_core.flags import add_flags, flag, read_flags
from slime_retries.breaker import Thresholds

__all__ = ["Settings", "add_retry_options"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags. ``attempts`` counts the first attempt, too. ``breaker`` None: no circuit breakers."""

    attempts: int = flag(
        "--retry-max-retries", default=5, at_least=1, metavar="N",
        help="how often a request is tried, the first time included",
    )  # fmt: skip
    initial_backoff_ms: float = flag(
        "--retry-initial-backoff-ms", default=50.0, above=0, metavar="MS",
        help="wait before the second attempt (default: %(default)g)",
    )  # fmt: skip
    max_backoff_ms: float = flag(
        "--retry-max-backoff-ms", default=30_000.0, above=0, metavar="MS",
        help="longest wait between two attempts (default: %(default)g)",
    )  # fmt: skip
    backoff_multiplier: float = flag(
        "--retry-backoff-multiplier", default=1.5, at_least=1, metavar="FACTOR",
        help="growth of the wait from one attempt to the next",
    )  # fmt: skip
    jitter: float = flag(
        "--retry-jitter-factor", default=0.2, at_least=0, at_most=1, metavar="SHARE",
        help="share of the wait, 0 to 1, by which it varies at random, up or down",
    )  # fmt: skip
    disabled: bool = flag("--disable-retries", default=False, help="try each request once")
    breaker: Thresholds | None = field(default_factory=Thresholds)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        thresholds = read_flags(Thresholds, options)
        return read_flags(cls, options, breaker=None if thresholds.disabled else thresholds)


def add_retry_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    add_flags(parser, Settings)
    add_flags(parser, Thresholds)
