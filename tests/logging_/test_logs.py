"""The log: its formats, and a file for each day. That ``--log-dir`` is written to is in tests/compatibility."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest

from deadlines import HANG_S
from router_core.cli import main
from router_core.logs import start_logging
from router_core.settings import Settings
from slime_logging import JsonLines, Lines, TextLines, daily_file

FORGED = "2026-01-01 00:00:00,000 INFO router_core: worker added"


def said(text: str) -> logging.LogRecord:
    return logging.LogRecord("router_core", logging.INFO, __file__, 1, text, None, None)


def waiting(text: str) -> logging.LogRecord:
    record = said(text)
    record.may_wait = True
    return record


def with_fields(**fields: Any) -> logging.LogRecord:
    record = said("request")
    record.fields = fields
    return record


def failing(text: str) -> logging.LogRecord:
    try:
        raise ValueError(text)
    except ValueError as error:
        return logging.LogRecord("it", logging.ERROR, __file__, 1, "failed", None, (ValueError, error, None))


def days_of(directory: Path, number: int, *, keep: int = 0) -> list[Path]:
    """The files after ``number`` days, the newest one first."""
    file = daily_file(directory / "slime-router.log", keep=keep)
    try:
        for day in range(number):
            file.emit(said(f"day {day}"))
            file.rolloverAt = day + 86_400 * (day + 1)  # midnight has come
    finally:
        file.close()
    return [directory / "slime-router.log", *sorted(directory.glob("slime-router.log.*"), reverse=True)]


def test_the_file_of_an_earlier_day_is_kept_under_its_date(tmp_path: Path) -> None:
    files = days_of(tmp_path / "new" / "logs", 3)
    assert [path.read_text() for path in files] == ["day 2\n", "day 1\n", "day 0\n"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert all(re.fullmatch(r"\.\d{4}-\d\d-\d\d", path.suffix) for path in files[1:])


def test_files_of_earlier_days_beyond_the_retention_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "slime-router.log.bak").touch()  # not ours
    files = days_of(tmp_path, 5, keep=2)
    assert [path.name for path in files].count("slime-router.log.bak") == 1
    assert [path.read_text() for path in files if path.suffix != ".bak"] == ["day 4\n", "day 3\n", "day 2\n"]


def test_a_negative_retention_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--log-retention-days", "-1"]) == 2
    assert "--log-retention-days: wanted 0 or more, got -1" in capsys.readouterr().err


def test_traceback_is_indented_and_forges_no_log_line() -> None:
    message, *traceback = TextLines("%(message)s").format(failing(f"a\n{FORGED}\x1b[2J")).split("\n")
    assert message == "failed"
    assert traceback == ["ValueError: a", f"  {FORGED}\\x1b[2J"]


def test_fields_are_pairs_in_text_and_quoted_where_they_would_be_ambiguous() -> None:
    record = with_fields(path="/a", session='s" x=1\n', seconds=0.5, exact=True, workers=["u", "v"], none="")
    line = TextLines("%(message)s").format(record)
    assert line == r'''request path=/a session="s\" x=1\n" seconds=0.5 exact=true workers=u,v none=""'''


@pytest.mark.parametrize(
    "odd", ["", "a b", "a=b", "=", "a=", 'a"', "a\\", "\x00", "\x7f", "\u2028", "\xe9", "\ud800", "x y=1"]
)
def test_odd_value_is_quoted_in_each_place(odd: str) -> None:
    for values in ((odd, "1", "2"), ("1", odd, "2"), ("1", "2", odd)):
        line = TextLines("%(message)s").format(with_fields(**dict(zip("abc", values, strict=True))))
        told = " ".join(
            f"{name}={json.dumps(odd) if value == odd else value}"
            for name, value in zip("abc", values, strict=True)
        )
        assert line == f"request {told}"


@pytest.mark.parametrize("odd", ["\n", "\r", "\x85", "\u2028", "\x1b[2J", "\ud800", '"', "}\n{"])
def test_json_line_is_one_object_whatever_is_in_it(odd: str) -> None:
    record = with_fields(session=f"a{odd}{FORGED}", message="not this")
    line = JsonLines().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", read.pop("time"))
    assert read == {
        "level": "INFO",
        "logger": "router_core",
        "message": "request",
        "session": f"a{odd}{FORGED}",
    }


def test_json_line_of_an_error_has_its_traceback() -> None:
    read = json.loads(JsonLines().format(failing("a\nb")))
    assert (read["message"], read["traceback"].splitlines()[-2:]) == ("failed", ["ValueError: a", "b"])


def test_console_and_file_have_the_same_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root", logging.INFO)
    monkeypatch.setattr(logging, "root", root)
    start_logging(Settings(log_dir=str(tmp_path), log_format="json"))
    root.info("worker %s", "added")
    for handler in root.handlers:
        handler.close()
    console, file = capsys.readouterr().err, (tmp_path / "slime-router.log").read_text()
    assert console == file
    assert json.loads(file)["message"] == "worker added"


def test_lines_that_may_wait_keep_their_place_before_others() -> None:
    streams = io.StringIO(), io.StringIO()
    lines = Lines(TextLines("%(message)s"), [logging.StreamHandler(stream) for stream in streams])
    try:
        for number in range(3):
            lines.handle(waiting(f"request {number}"))
        assert streams[0].getvalue() == ""
        lines.handle(said("worker added"))
        assert streams[0].getvalue().split("\n") == [
            "request 0",
            "request 1",
            "request 2",
            "worker added",
            "",
        ]
        lines.handle(waiting("request 3"))
        deadline = time.monotonic() + HANG_S
        while "request 3" not in streams[1].getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        lines.handle(waiting("request 4"))
    finally:
        lines.close()
    lines.handle(waiting("request 5"))
    for stream in streams:
        assert stream.getvalue().split("\n")[3:] == [
            "worker added",
            "request 3",
            "request 4",
            "request 5",
            "",
        ]


def test_lines_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_logging.lines._MAX_WAITING", 10)
    stream = io.StringIO()
    lines = Lines(TextLines("%(message)s"), [logging.StreamHandler(stream)])
    for number in range(11):
        lines.handle(waiting(f"request {number}"))
    assert stream.getvalue().count("\n") == 11
    lines.close()


def test_record_that_cannot_be_formatted_loses_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    lines = Lines(TextLines("%(message)s"), [logging.StreamHandler(stream)])
    broken = said("%d workers")
    broken.args = ("many",)
    lines.handle(waiting("request"))
    lines.handle(broken)
    lines.close()
    assert stream.getvalue() == "request\n"
    assert "%d format" in capsys.readouterr().err
