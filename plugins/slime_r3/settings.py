"""The plugin's flags, validated once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core.errors import SettingsError
from router_core.flags import add_flags, flag, read_flags

__all__ = ["ALWAYS", "WHEN_ASKED", "Settings", "add_r3_options"]

ALWAYS, WHEN_ASKED = "always", "when-asked"
#: Enough for 500 samples of 32k tokens, if a model has 60 layers, 8 experts per layer, and one byte for each expert.
_MAX_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags; each flag has a help text."""

    inject: str = flag(
        "--r3-inject", default=ALWAYS, choices=(ALWAYS, WHEN_ASKED),
        help="ask engines for the routed experts of every generation, or only when the client asks (default always)",
    )  # fmt: skip
    max_bytes: int = flag(
        "--r3-max-bytes", default=_MAX_BYTES, at_least=0, metavar="BYTES",
        help="memory for all rows, 0 for no limit; above the limit, the oldest rows are moved to a store, if there is "
        f"one, else dropped (default {_MAX_BYTES:,})",
    )  # fmt: skip
    shape: tuple[int, int] | None = flag(
        "--r3-shape", nargs=2, type=int, metavar=("LAYERS", "TOP_K"),
        help="number of layers, and of experts per token (default: as a worker reports; without a report, experts are "
        "exact only once two answers agree on the size of a row)",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        told = options.r3_shape
        if told is not None and min(told) < 1:
            raise SettingsError(f"--r3-shape: wanted two numbers of 1 or more, got {told[0]} {told[1]}")
        return read_flags(cls, options)


def add_r3_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_flags(parser.add_argument_group("r3"), Settings)
