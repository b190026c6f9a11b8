"""The flags of the control plane."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core.flags import flag, read_flags

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds."""

    control_timeout_s: float = flag(
        "--control-timeout-s", default=600.0, above=0, metavar="S",
        help="deadline for each worker's answer to a control call",
    )  # fmt: skip
    pause_queue_timeout_s: float = flag(
        "--pause-queue-timeout-s", default=300.0, above=0, metavar="S",
        help="longest wait of a request while generation is paused",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        return read_flags(cls, options)
