"""Ctrl-C before a command is ready to catch it: the process ends at once, and quietly."""

from __future__ import annotations

import os
import signal

__all__ = ["INTERRUPTED", "end_now", "end_quietly", "raise_again"]

#: The exit status after SIGINT, as shells report it.
INTERRUPTED = 128 + signal.SIGINT


def end_quietly() -> None:
    """Let SIGINT end the process at once from now on, unless SIGINT is ignored or has a handler already.

    An exception would not always end it: in an import, a callback of the interpreter may print or lose the exception.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_now)


def raise_again() -> None:
    """Let SIGINT raise KeyboardInterrupt again, if :func:`end_quietly` has changed that."""
    if signal.getsignal(signal.SIGINT) is end_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_now(*_: object) -> None:
    """End the process, as a handler of SIGINT."""
    os._exit(INTERRUPTED)
