"""The flags of the metrics, with the names that the SGLang gateway uses."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise

from router_core import SettingsError
from router_core.flags import flag, read_flags
from slime_start.values import host as address

__all__ = ["DURATION_BUCKETS", "Settings"]

#: Upper bounds in seconds, as the SGLang gateway has them.
DURATION_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0,
)  # fmt: skip
_MAX_BUCKETS = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin. ``port`` None: the metrics are at ``/metrics`` of the router only."""

    port: int | None = flag(
        "--prometheus-port", type=int, at_least=0, at_most=65535, metavar="PORT",
        help="also serve the metrics on a port of their own, without a key; 0: any free one",
    )  # fmt: skip
    host: str = flag(
        "--prometheus-host",
        default="0.0.0.0",
        type=address,
        metavar="HOST",
        help="address of --prometheus-port",
    )
    buckets: tuple[float, ...] = flag(
        "--prometheus-duration-buckets", nargs="+", type=float, metavar="S",
        help="upper bounds of the histograms of durations, ascending (default: those of the SGLang gateway)",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = read_flags(cls, options)
        given = tuple(settings.buckets or ())
        rising = all(before < after for before, after in pairwise((0.0, *given, math.inf)))
        if not rising or len(given) > _MAX_BUCKETS:
            raise SettingsError(
                f"--prometheus-duration-buckets: wanted at most {_MAX_BUCKETS} ascending numbers of seconds above 0,"
                f" got {' '.join(f'{bound:g}' for bound in given[:_MAX_BUCKETS])}"
            )
        return cls(settings.port, settings.host, given or DURATION_BUCKETS)
