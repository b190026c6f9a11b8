"""A log of anything that comes and goes. What the logs of trajectories and of conversations need is tested there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from deadlines import HANG_S
from router_core.errors import StartupError
from slime_journal.record_files import LogDirectory, LogKind
from slime_journal.record_log import RecordLog


class Came(NamedTuple):
    """A thing with some text."""

    serial: int
    parent: int
    size: int
    text: str = "some text, so that files get full"


class Went(NamedTuple):
    """It has gone."""

    serial: int
    size: int


class Noted(NamedTuple):
    """Something else."""

    text: str


THINGS = LogKind("things", "things 1", (Came,), Went, (Noted,), "things of another one")


def opened(path: Path, take: Callable[[Any], None] = lambda record: None, reader: str = "me") -> RecordLog:
    log = RecordLog(LogDirectory(path, "--things"), THINGS, reader, file_bytes=300)
    log.replay(take)
    return log


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def tidied(log: RecordLog, is_needed: Callable[[Any], bool] = lambda record: False) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.tidy, is_needed)
        with anyio.fail_after(HANG_S):
            while log._due():  # noqa: ASYNC110  # what is waited for is on the disk
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_number_is_given_once_though_nothing_is_left_that_had_one(tmp_path: Path) -> None:
    log = opened(tmp_path)
    numbers = []
    while len(log.files) < 2:
        numbers.append(log.number())
        log.append([Came(numbers[-1], 0, 1), Went(numbers[-1], 1)])
    await tidied(log)
    log.close()
    found: list[Any] = []
    again = opened(tmp_path, found.append)
    assert found == []
    assert again.number() == numbers[-1] + 1
    again.close()


@pytest.mark.anyio
async def test_what_has_another_meaning_stays_for_as_long_as_it_has_one(tmp_path: Path) -> None:
    log = opened(tmp_path)
    last = 0
    while len(log.files) < 3:
        last = log.number()
        log.append([Came(last, 0, 1), Noted("needed"), Noted("not needed"), Went(last, 1)])
    await tidied(log, lambda record: record == Noted("needed"))
    log.close()
    found: list[Any] = []
    opened(tmp_path, found.append).close()
    assert found == [Noted("needed")] * last


def test_when_one_log_cannot_be_written_none_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none tells of what another one lacks."""
    directory = LogDirectory(tmp_path, "--things")
    logs = [RecordLog(directory, replace(THINGS, name=name), "me") for name in ("things", "others")]
    for log in logs:
        log.replay(lambda record: None)
        log.append([Came(log.number(), 0, 1)])
    before = directory.as_dict()
    assert (before["files"], before["failed"]) == (2, None)
    monkeypatch.setattr("os.writev", lambda fd, pieces: os.write(fd, pieces[0]))  # as a full disk does
    logs[0].append([Came(logs[0].number(), 0, 1)])
    monkeypatch.undo()
    for log in logs:
        log.append([Came(log.number(), 0, 1)])
        log.close()
    after = directory.as_dict()
    assert after["failed"] is not None
    assert {**after, "failed": None} == before
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == before["bytes"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.anyio
async def test_a_log_that_was_given_up_stays_as_it_is(tmp_path: Path) -> None:
    """Tidying asks the live state, which has gone on without the log."""
    log = opened(tmp_path)
    while len(log.files) < 3:
        last = log.number()
        log.append([Came(last, 0, 1), Noted("needed when it was written"), Went(last, 1)])
    log._directory.failed = "the disk is full"
    before = content(tmp_path)
    assert log._due()
    with anyio.fail_after(HANG_S):
        await log.tidy(lambda record: False)
    assert content(tmp_path) == before
    log.close()


def test_record_with_an_evicted_parent_is_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([Came(1, 0, 1), Came(2, 1, 1), Went(2, 1), Went(1, 1), Came(3, 1, 1), Came(4, 3, 1)])
    log.close()
    path = tmp_path / "00000001.things"
    message = f"--things: {path} has the first of 2 records without their parent; move {tmp_path} away"
    for _ in range(2):  # it lets go of the directory
        with pytest.raises(StartupError, match=message):
            opened(tmp_path)
    with pytest.raises(StartupError, match=rf"has things of another one; move {tmp_path} away"):
        opened(tmp_path, reader="you")
