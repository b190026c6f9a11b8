"""Logging to the console, and to one file per day."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

from router_core.errors import SettingsError
from router_core.settings import Settings

__all__ = ["daily_file", "start_logging"]

_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
_FILE = "slime-router.log"


class _DailyFile(TimedRotatingFileHandler):
    """A log file that only its owner can read."""

    def _open(self) -> TextIOWrapper:  # logging's name
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _OneLine(logging.Formatter):
    """Escapes control characters and indents tracebacks, so that clients and workers cannot forge log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        return super().formatMessage(record).translate(_CONTROL)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # logging's name
        return super().formatException(ei).translate(_CONTROL | {ord("\n"): "\n  "})


def start_logging(settings: Settings) -> None:
    """Log as ``--log-level`` and ``--log-dir`` say. Raises SettingsError."""
    console = logging.StreamHandler()
    console.setFormatter(_OneLine(_FORMAT))
    logging.basicConfig(level=_LEVELS[settings.log_level], handlers=[console])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs a line for each health probe
    if settings.log_dir is not None:
        file = daily_file(Path(settings.log_dir))
        file.setFormatter(_OneLine(_FORMAT))
        logging.getLogger().addHandler(file)


def daily_file(directory: Path) -> TimedRotatingFileHandler:
    """Create ``directory``, and return the handler of ``slime-router.log`` in it. Raises SettingsError.

    The date is appended to the name of an earlier day's file. No file is ever deleted.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _DailyFile(directory / _FILE, when="midnight", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--log-dir {directory}: {error.strerror or error}") from None
