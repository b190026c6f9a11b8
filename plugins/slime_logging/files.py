"""A log file for each day."""

from __future__ import annotations

import os
from io import TextIOWrapper
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

__all__ = ["daily_file"]


class _DailyFile(TimedRotatingFileHandler):
    """A log file that only its owner can read."""

    def _open(self) -> TextIOWrapper:  # logging's name
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def daily_file(path: Path, *, keep: int = 0) -> TimedRotatingFileHandler:
    """Create the directory of ``path``, and return the handler of a file at ``path``. Raises OSError.

    At midnight the date is appended to the name of the day's file. ``keep``: the number of dated files to
    keep, 0: all; the oldest are deleted.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _DailyFile(path, when="midnight", backupCount=keep, encoding="utf-8")
