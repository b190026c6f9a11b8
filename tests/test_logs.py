"""``--log-dir``: a file for each day, of which none is lost. That it is written to is in tests/compatibility."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from router_core.logs import _OneLine, daily_file


def said(text: str) -> logging.LogRecord:
    return logging.LogRecord("router_core", logging.INFO, __file__, 1, text, None, None)


def test_the_file_of_an_earlier_day_is_kept_under_its_date(tmp_path: Path) -> None:
    file = daily_file(tmp_path / "new" / "logs")
    try:
        for day in range(3):
            file.emit(said(f"day {day}"))
            file.rolloverAt = day + 86_400 * (day + 1)  # midnight has come
    finally:
        file.close()
    (now,) = tmp_path.glob("new/logs/slime-router.log")
    earlier = sorted(tmp_path.glob("new/logs/slime-router.log.*"))
    assert now.read_text() == "day 2\n"
    assert [path.read_text() for path in earlier] == ["day 0\n", "day 1\n"]
    assert {path.stat().st_mode & 0o777 for path in (now, *earlier)} == {0o600}
    assert all(re.fullmatch(r"\.\d{4}-\d\d-\d\d", path.suffix) for path in earlier)


def test_traceback_is_indented_and_forges_no_log_line() -> None:
    forged = "2026-01-01 00:00:00,000 INFO router_core: worker added"
    try:
        raise ValueError(f"a\n{forged}\x1b[2J")
    except ValueError as error:
        record = logging.LogRecord(
            "it", logging.ERROR, __file__, 1, "failed", None, (ValueError, error, None)
        )
    message, *traceback = _OneLine("%(message)s").format(record).split("\n")
    assert message == "failed"
    assert traceback == ["ValueError: a", f"  {forged}\\x1b[2J"]
