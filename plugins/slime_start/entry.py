"""The start of the process ``slime-router``: little is imported here, so that Ctrl-C works from the beginning."""

from __future__ import annotations

import importlib

from slime_start.interrupts import INTERRUPTED, end_quietly

__all__ = ["main"]


def main() -> int:
    """Run ``slime-router`` with the command line of the process. Return the exit code: 130 after Ctrl-C."""
    end_quietly()
    try:
        # The core and its libraries take a second or more to import.
        return int(importlib.import_module("router_core.cli").main())
    except KeyboardInterrupt:
        return INTERRUPTED
