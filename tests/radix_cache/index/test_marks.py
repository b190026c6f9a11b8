"""Marks of what was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from router_core.errors import StartupError
from slime_journal.record_files import LogDirectory
from slime_radix_cache.index.losses import Count, Marks, opened
from slime_radix_cache.journal.unfinished import SessionFile, UnansweredSessions, UnfinishedStreams


def _marks(path: Path | None = None) -> Marks:
    return Marks(path, exact=100, bits=1 << 16)


def test_no_mark_is_ever_forgotten() -> None:
    marks = _marks()
    names = [f"session-{number}" for number in range(5_000)]
    for name in names:
        marks.add(name)
    assert all(name in marks for name in names)
    assert marks.size_bytes < (1 << 13) + 100 * 200


def test_false_alarms_are_as_rare_as_said() -> None:
    marks = _marks()
    for number in range(5_000):
        marks.add(f"session-{number}")
    alarms = sum(f"other-{number}" in marks for number in range(20_000)) / 20_000
    assert marks.false_alarm_rate / 2 < alarms < 2 * marks.false_alarm_rate


def test_marks_are_counted_while_there_are_few() -> None:
    marks = _marks()
    assert marks.count("never") == Count(0, at_least=False)
    for _ in range(3):
        marks.add("text")
    assert marks.count("text") == Count(3, at_least=False)
    assert marks.count("never") == Count(0, at_least=False)


def test_uncounted_losses_are_reported_as_at_least_one() -> None:
    marks = _marks()
    for _ in range(3):
        marks.add("text")
    for number in range(200):
        marks.add(f"session-{number}")
    assert marks.count("text") == Count(1, at_least=True)
    marks.add("text")
    marks.add("text")
    assert marks.count("text") == Count(2, at_least=True)


def test_marks_in_a_file_outlive_the_process(tmp_path: Path) -> None:
    marks = _marks(tmp_path / "marks")
    marks.add("lost")
    again = _marks(tmp_path / "marks")  # nothing was closed: as after SIGKILL
    assert "lost" in again
    assert "kept" not in again
    assert again.count("lost") == Count(1, at_least=True)
    assert again.number == 1
    assert (tmp_path / "marks").stat().st_mode & 0o777 == 0o600


def test_file_of_a_process_that_was_killed_before_its_first_mark_is_new(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    _marks(path)
    path.write_bytes(bytes(path.stat().st_size))  # it is allocated, and its header is not written
    _marks(path).add("lost")
    again = _marks(path)
    assert "lost" in again
    assert again.number == 1


@pytest.mark.parametrize(
    "content", [b"too short", b"x" * (56 + (1 << 23)), bytes(56) + b"x" + bytes((1 << 23) - 1)]
)
def test_a_file_that_has_no_marks_ends_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sessions.marks").write_bytes(content)
    with pytest.raises(StartupError, match=r"sessions\.marks: wanted"):
        opened(LogDirectory(tmp_path, "--trajectory-log"), "sessions.marks", Marks)


def test_a_directory_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        opened(LogDirectory(tmp_path / "none", "--trajectory-log"), "sessions.marks", Marks)


def test_a_stream_that_a_kill_cuts_off_is_lost_to_its_session(tmp_path: Path) -> None:
    streams = UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), _marks(), _marks())
    ends = {name: streams.begin(name) for name in ("ended", "cut", "cut again")}
    ends["ended"]()
    lost, texts = _marks(), _marks()
    UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), lost, texts)
    assert [name in lost for name in ends] == [False, True, True]
    assert texts.number == 1, "nobody knows which texts"
    later, texts = _marks(), _marks()
    UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), later, texts)
    assert (later.number, texts.number) == (0, 0)


def test_nobodys_stream_that_a_kill_cuts_off_is_lost_to_no_session(tmp_path: Path) -> None:
    UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), _marks(), _marks()).begin(None)
    lost, texts = _marks(), _marks()
    UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), lost, texts)
    assert (lost.number, texts.number) == (0, 1)


def test_a_stream_for_which_there_is_no_room_counts_as_lost(tmp_path: Path) -> None:
    lost, texts = _marks(), _marks()
    streams = UnfinishedStreams(SessionFile(tmp_path / "streams", slots=1), lost, texts)
    end = streams.begin("first")
    streams.begin(None)()
    assert (lost.number, texts.number) == (0, 1)
    streams.begin("second")()
    assert ("first" in lost, "second" in lost) == (False, True)
    end()
    streams.begin("third")()
    assert "third" not in lost


def test_a_file_of_streams_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "streams").write_bytes(b"short")
    with pytest.raises(ValueError, match="wanted 128 bytes of sessions, got 5"):
        UnfinishedStreams(SessionFile(tmp_path / "streams", slots=8), _marks(), _marks())


def test_a_session_without_an_answer_is_known_in_later_processes(tmp_path: Path) -> None:
    def process() -> UnansweredSessions:
        return UnansweredSessions(SessionFile(tmp_path / "sessions", slots=8), _marks())

    sessions = process()
    for name in ("answered", "refused", "twice", "twice", "killed", "forgotten"):
        sessions.begin(name)
    for name, is_remembered in (
        ("answered", False),
        ("refused", True),
        ("twice", False),
        ("forgotten", True),
    ):
        sessions.end(name, is_remembered=is_remembered)
    sessions.forget("forgotten")
    assert "killed" not in sessions  # this process knows what it asked
    for _ in range(2):
        later = process()
        known = [name for name in ("answered", "refused", "twice", "killed", "forgotten") if name in later]
        assert known == ["refused", "twice", "killed"]


def test_a_session_without_a_slot_counts_as_lost(tmp_path: Path) -> None:
    lost = _marks()
    sessions = UnansweredSessions(SessionFile(tmp_path / "sessions", slots=1), lost)
    for name in ("first", "second"):
        sessions.begin(name)
    assert ("first" in lost, "second" in lost) == (False, True)
    for name in ("first", "second"):
        sessions.end(name, is_remembered=False)
    sessions.begin("third")
    assert "third" not in lost


def test_session_of_a_former_process_gives_up_its_slot(tmp_path: Path) -> None:
    lost = _marks()

    def process() -> UnansweredSessions:
        return UnansweredSessions(SessionFile(tmp_path / "sessions", slots=3), lost)

    for name in ("first", "second"):
        sessions = process()
        for _ in range(2):
            sessions.begin(name)
    sessions = process()
    sessions.begin("first")  # it has its slot
    sessions.begin("third")
    assert lost.number == 0
    sessions.begin("fourth")
    assert "fourth" not in lost
    assert [name in sessions or name in lost for name in ("first", "second")] == [True, True]
    assert lost.number == 1
    later = process()
    assert all(name in later or name in lost for name in ("first", "second", "third", "fourth"))
    assert "third" in later
