"""The flags of the health checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core import SettingsError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds.

    The timeout is long because SGLang's ``/health`` generates a token: at least a second, and up to twenty under load.
    """

    interval_s: float = 10.0
    timeout_s: float = 20.0
    failure_threshold: int = 3
    endpoint: str = "/health"
    enabled: bool = True

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = cls(
            interval_s=options.health_check_interval_secs,
            timeout_s=options.health_check_timeout_secs,
            failure_threshold=options.health_failure_threshold,
            endpoint=options.health_check_endpoint,
            enabled=not options.disable_health_check,
        )
        if not settings.interval_s > 0:
            raise SettingsError(f"--health-check-interval-secs: wanted above 0, got {settings.interval_s}")
        if not settings.timeout_s > 0:
            raise SettingsError(f"--health-check-timeout-secs: wanted above 0, got {settings.timeout_s}")
        if settings.failure_threshold < 1:
            raise SettingsError(
                f"--health-failure-threshold: wanted 1 or more, got {settings.failure_threshold}"
            )
        if not settings.endpoint.startswith("/"):
            raise SettingsError(
                f"--health-check-endpoint: wanted a path such as /health, got {settings.endpoint!r}"
            )
        return settings
