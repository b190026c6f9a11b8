"""Threads that start at once, and end after their calls."""

from __future__ import annotations

import logging
import threading

import pytest

from slime_tiered_store.tiers.ssd.threads import StartedThreads


def test_calls_run_at_the_same_time_and_all_have_run_at_the_end() -> None:
    threads = StartedThreads(3, "worker")
    meet, names = threading.Barrier(3), set[str]()

    def call() -> None:
        meet.wait()
        names.add(threading.current_thread().name)

    for _ in range(9):
        threads.submit(call)
    threads.close()
    assert names == {"worker_0", "worker_1", "worker_2"}
    threads.close()  # again: nothing is left to do
    with pytest.raises(RuntimeError, match="the threads have ended"):
        threads.submit(call)


def test_thread_survives_a_call_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    threads, ran = StartedThreads(1, "worker"), list[int]()

    def fail() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        threads.submit(fail)
        threads.submit(lambda: ran.append(1))
        threads.close()
    assert ran == [1]
    assert "a thread of the SSD tier failed" in caplog.text


def test_refused_thread_ends_those_that_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.enumerate(), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if len(threading.enumerate()) > len(before):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        StartedThreads(2, "worker")
    assert threading.enumerate() == before
