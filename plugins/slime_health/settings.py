"""The flags of the health checks."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal, get_args

from router_core import SettingsError, hookimpl

__all__ = ["Readmit", "Settings", "add_options"]

#: Which weights a worker may come back with.
Readmit = Literal["matching", "any"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. ``lag_s``: how long workers with newer weights wait for the others.

    The timeout is long because SGLang's ``/health`` generates a token: at least a second, and up to twenty under load.
    """

    interval_s: float = 10.0
    timeout_s: float = 20.0
    failure_threshold: int = 3
    success_threshold: int = 2
    endpoint: str = "/health"
    readmit: Readmit = "matching"
    enabled: bool = True
    lag_s: float = 30.0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = cls(
            interval_s=options.health_check_interval_secs,
            timeout_s=options.health_check_timeout_secs,
            failure_threshold=options.health_failure_threshold,
            success_threshold=options.health_success_threshold,
            endpoint=options.health_check_endpoint,
            readmit=options.readmit,
            enabled=not options.disable_health_check,
        )
        for flag, seconds in (
            ("--health-check-interval-secs", settings.interval_s),
            ("--health-check-timeout-secs", settings.timeout_s),
        ):
            if not 0 < seconds < math.inf:
                raise SettingsError(f"{flag}: wanted a number above 0, got {seconds}")
        for flag, count in (
            ("--health-failure-threshold", settings.failure_threshold),
            ("--health-success-threshold", settings.success_threshold),
        ):
            if count < 1:
                raise SettingsError(f"{flag}: wanted 1 or more, got {count}")
        path = settings.endpoint
        if not (path.startswith("/") and path.isascii() and path.isprintable()) or " " in path:
            raise SettingsError(f"--health-check-endpoint: wanted a path such as /health, got {path!r}")
        return settings


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags; a second name is slime's."""
    default = Settings()
    parser.add_argument(
        "--health-check-interval-secs", "--rollout-health-check-interval",
        type=float, default=default.interval_s, metavar="S",
        help="time between two probes of a worker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-check-timeout-secs", "--rollout-health-check-timeout",
        type=float, default=default.timeout_s, metavar="S",
        help="deadline of a probe (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-failure-threshold", "--slime-router-health-check-failure-threshold",
        type=int, default=default.failure_threshold, metavar="N",
        help="failures in a row, of probes and requests, that quarantine a worker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-success-threshold", type=int, default=default.success_threshold, metavar="N",
        help="good probes in a row that a worker needs to come back (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-check-endpoint", default=default.endpoint, metavar="PATH",
        help="what is probed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--readmit", choices=get_args(Readmit), default=default.readmit,
        help="with which weights a worker comes back: those of the fleet, or any (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--disable-health-check", action="store_true", help="do not look after the workers")
