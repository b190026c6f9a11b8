"""Single keys of a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keys_one_by_one", "wait_for_key"]


@contextmanager
def keys_one_by_one() -> Iterator[None]:
    """Read keys without Enter and without an echo. Ctrl-C still interrupts."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def wait_for_key(keys: str, seconds: float) -> bool:
    """Wait for one of ``keys``. Return False if none of them was pressed within ``seconds``."""
    descriptor = sys.stdin.fileno()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        # Not sys.stdin.read, which would keep further keys in a buffer that select does not see.
        if ready and os.read(descriptor, 1).decode("latin-1") in keys:
            return True
    return False
