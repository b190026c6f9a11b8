"""Lines of the request log, as tests read them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

__all__ = ["fields_of", "last_line"]


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each request, in the order of their ends."""
    return [record.fields for record in _lines(caplog)]  # type: ignore[attr-defined]  # set by `extra`


def last_line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The line of the request that ended last."""
    return _lines(caplog)[-1]


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "slime_access_log"]
