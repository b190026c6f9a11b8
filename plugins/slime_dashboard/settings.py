"""The flags of the dashboard."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from router_core import SettingsError
from router_core.flags import flag, read_flags
from slime_sglang.known_paths import KNOWN_PATHS

__all__ = ["Settings"]

#: One or more segments of letters, digits, ``-``, ``_`` and ``.``; no segment begins with ``.``.
_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin. ``path``: the path of the first page; all other paths begin with it."""

    path: str = flag(
        "--dashboard-path", default="/ui", metavar="PATH",
        help="path of the dashboard; set it if workers use /ui themselves",
    )  # fmt: skip
    disabled: bool = flag("--no-dashboard", default=False, help="serve no dashboard")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = read_flags(cls, options)
        path = settings.path
        if not _PATH.fullmatch(path):
            raise SettingsError(f"--dashboard-path: wanted a path such as /ui, got {path!r}")
        if path in KNOWN_PATHS:
            raise SettingsError(
                f"--dashboard-path: the path {path} is taken, since the router or an engine answers it;"
                " wanted a path such as /ui"
            )
        return settings
