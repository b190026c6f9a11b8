"""The flags of retries and breakers, spelt as the SGLang gateway spells them, with its defaults."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field

from router_core import SettingsError
from slime_retries.breaker import Thresholds

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """``attempts`` counts the first one, as the gateway's ``--retry-max-retries`` does. No ``breaker``: none opens."""

    attempts: int = 5
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    backoff_multiplier: float = 1.5
    jitter: float = 0.2
    breaker: Thresholds | None = field(default_factory=Thresholds)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        for flag, number in (
            ("--retry-max-retries", options.retry_max_retries),
            ("--cb-failure-threshold", options.cb_failure_threshold),
            ("--cb-success-threshold", options.cb_success_threshold),
        ):
            if number < 1:
                raise SettingsError(f"{flag}: wanted 1 or more, got {number}")
        for flag, number in (
            ("--retry-initial-backoff-ms", options.retry_initial_backoff_ms),
            ("--retry-max-backoff-ms", options.retry_max_backoff_ms),
            ("--cb-timeout-duration-secs", options.cb_timeout_duration_secs),
            ("--cb-window-duration-secs", options.cb_window_duration_secs),
        ):
            if not 0 < number < math.inf:
                raise SettingsError(f"{flag}: wanted a number above 0, got {number}")
        if not 1 <= options.retry_backoff_multiplier < math.inf:
            raise SettingsError(
                f"--retry-backoff-multiplier: wanted 1 or more, got {options.retry_backoff_multiplier}"
            )
        if not 0 <= options.retry_jitter_factor <= 1:
            raise SettingsError(f"--retry-jitter-factor: wanted 0 to 1, got {options.retry_jitter_factor}")
        return cls(
            attempts=1 if options.disable_retries else options.retry_max_retries,
            initial_backoff_s=options.retry_initial_backoff_ms / 1000,
            max_backoff_s=options.retry_max_backoff_ms / 1000,
            backoff_multiplier=options.retry_backoff_multiplier,
            jitter=options.retry_jitter_factor,
            breaker=None
            if options.disable_circuit_breaker
            else Thresholds(
                failures=options.cb_failure_threshold,
                successes=options.cb_success_threshold,
                timeout_s=options.cb_timeout_duration_secs,
                window_s=options.cb_window_duration_secs,
            ),
        )
