"""Logging to the console and, with ``--log-dir``, to one file per day."""

from __future__ import annotations

import logging
from pathlib import Path

from router_core.errors import SettingsError
from router_core.settings import Settings
from slime_logging import FORMATS, Lines, daily_file

__all__ = ["start_logging"]

_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}
_FILE = "slime-router.log"


def start_logging(settings: Settings) -> None:
    """Log as the flags ``--log-...`` say. Raises SettingsError."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if (directory := settings.log_dir) is not None:
        try:
            handlers.append(daily_file(Path(directory) / _FILE, keep=settings.log_retention_days))
        except OSError as error:
            raise SettingsError(
                f"--log-dir: wanted a directory, got {directory}: {error.strerror or error}"
            ) from None
    lines = Lines(FORMATS[settings.log_format](), handlers)
    logging.basicConfig(level=_LEVELS[settings.log_level], handlers=[lines])
    if settings.log_retention_days and settings.log_dir is None:
        logging.warning("--log-retention-days has no effect without --log-dir")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else httpx logs a line for each health probe
