"""Where the log goes: to the console, and to a file of each day."""

from __future__ import annotations

import logging
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

from router_core.errors import SettingsError
from router_core.settings import Settings

__all__ = ["daily_file", "start_logging"]

_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FILE = "slime-router.log"


def start_logging(settings: Settings) -> None:
    """Log as ``--log-level`` and ``--log-dir`` say. Raises SettingsError."""
    logging.basicConfig(level=_LEVELS[settings.log_level], format=_FORMAT)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per health probe tells an operator nothing
    if settings.log_dir is not None:
        file = daily_file(Path(settings.log_dir))
        file.setFormatter(logging.Formatter(_FORMAT))
        logging.getLogger().addHandler(file)


def daily_file(directory: Path) -> TimedRotatingFileHandler:
    """Writes to ``slime-router.log`` in ``directory``, which is made. Raises SettingsError.

    The file of an earlier day is renamed, its date behind its name; none is ever deleted.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return TimedRotatingFileHandler(directory / _FILE, when="midnight", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--log-dir {directory}: {error.strerror or error}") from None
