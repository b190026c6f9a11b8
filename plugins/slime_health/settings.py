"""The flags of the health checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal, get_args

from router_core import SettingsError, hookimpl
from router_core.flags import add_flags, flag, read_flags

__all__ = ["Readmit", "Settings", "add_options"]

#: The weights with which a worker may come back.
Readmit = Literal["matching", "any"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. The second name of a flag, if it has two, is slime's.

    ``lag_s``: during an update, workers with old weights are set aside when no worker has changed its weights for this
    long.
    ``timeout_s`` is long because SGLang's ``/health`` generates a token. This takes one second at least, and up to
    twenty under load.
    """

    interval_s: float = flag(
        "--health-check-interval-secs", "--rollout-health-check-interval", default=10.0, above=0, metavar="S",
        help="time between two probes of a worker",
    )  # fmt: skip
    timeout_s: float = flag(
        "--health-check-timeout-secs", "--rollout-health-check-timeout", default=20.0, above=0, metavar="S",
        help="deadline of a probe",
    )  # fmt: skip
    failure_threshold: int = flag(
        "--health-failure-threshold", "--slime-router-health-check-failure-threshold",
        default=3, at_least=1, metavar="N",
        help="failures in a row, of probes and requests, that quarantine a worker",
    )  # fmt: skip
    success_threshold: int = flag(
        "--health-success-threshold", default=2, at_least=1, metavar="N",
        help="good probes in a row that a worker needs to come back",
    )  # fmt: skip
    endpoint: str = flag("--health-check-endpoint", default="/health", metavar="PATH", help="path to probe")
    readmit: Readmit = flag(
        "--readmit", choices=get_args(Readmit), default="matching",
        help="the weights with which a worker may come back: those of the fleet, or any",
    )  # fmt: skip
    disabled: bool = flag("--disable-health-check", default=False, help="no probes, no quarantine, no return")
    lag_s: float = 30.0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = read_flags(cls, options)
        path = settings.endpoint
        if not (path.startswith("/") and path.isascii() and path.isprintable()) or " " in path:
            raise SettingsError(f"--health-check-endpoint: wanted a path such as /health, got {path!r}")
        return settings


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)
