"""The flags of the control plane."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from router_core import SettingsError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds: for each worker's answer, and for a request that waits while generation is paused."""

    control_timeout_s: float = 600.0
    pause_queue_timeout_s: float = 300.0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = cls(options.control_timeout_s, options.pause_queue_timeout_s)
        for flag, value in (
            ("--control-timeout-s", settings.control_timeout_s),
            ("--pause-queue-timeout-s", settings.pause_queue_timeout_s),
        ):
            if not 0 < value < math.inf:
                raise SettingsError(f"{flag}: wanted a number above 0, got {value}")
        return settings
