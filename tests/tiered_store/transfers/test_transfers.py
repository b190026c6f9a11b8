"""Graphs of transfers and their scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tiered_store.transfers import (
    OpStatus,
    TransferOp,
    TransferOpGraph,
    TransferScheduler,
    TransferType,
)

READ, WRITE, JOIN = TransferType.DISK2H, TransferType.H2DISK, TransferType.VIRTUAL


class Calls:
    """A graph that writes down its callbacks."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.graph = TransferOpGraph()
        self.graph.on_ready = lambda: self.told.append("ready")
        self.graph.on_complete = lambda: self.told.append("complete")
        self.graph.on_abort = lambda error: self.told.append(f"abort {error}")

    def op(self, name: str, kind: TransferType = WRITE, *after: TransferOp, end: bool = False) -> TransferOp:
        def ended(error: Exception | None) -> Exception | None:
            self.told.append(f"{name} {error}")
            return error

        op = TransferOp(kind, [], [], ended)
        for each in after:
            op.add_predecessor(each)
        self.graph.add_transfer_op(op)
        if end:
            self.graph.task_end_op = op
        return op


def test_an_operation_starts_after_those_it_depends_on() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    one, two = calls.op("one", READ), calls.op("two", READ)
    join = calls.op("join", JOIN, one, two, end=True)
    fill = calls.op("fill", WRITE, join)
    scheduler.submit(calls.graph)
    assert list(scheduler.next_ops()) == [one, two]
    scheduler.finish(two)
    assert list(scheduler.next_ops()) == []
    scheduler.finish(one)
    assert calls.told == ["two None", "one None", "join None", "ready"]
    assert list(scheduler.next_ops()) == [fill]
    scheduler.finish(fill)
    assert calls.told[4:] == ["fill None", "complete"]
    assert not scheduler.graphs


def test_an_error_aborts_what_depends_on_it() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    one, other = calls.op("one", READ), calls.op("other", READ)
    calls.op("fill", WRITE, calls.op("join", JOIN, one, other, end=True))
    scheduler.submit(calls.graph)
    list(scheduler.next_ops())
    scheduler.finish(one, OSError("EIO"))
    assert calls.told == ["one EIO", "join EIO", "fill EIO"]
    scheduler.finish(other)
    assert calls.told[3:] == ["other None", "abort EIO"]


def test_a_callback_can_fail_its_operation() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    op = calls.op("read", READ, end=True)
    op.on_end = lambda error: ValueError("other bytes")
    scheduler.submit(calls.graph)
    list(scheduler.next_ops())
    scheduler.finish(op)
    assert (calls.told, op.status) == (["abort other bytes"], OpStatus.ABORTED)


def test_a_callback_that_raises_fails_its_operation(caplog: pytest.LogCaptureFixture) -> None:
    calls, scheduler = Calls(), TransferScheduler()
    op = calls.op("read", READ)

    def fail(error: Exception | None) -> Exception | None:
        raise ZeroDivisionError("oops")

    op.on_end = fail
    scheduler.submit(calls.graph)
    list(scheduler.next_ops())
    scheduler.finish(op)
    assert calls.told == ["ready", "abort oops"]
    assert "callback of a transfer" in caplog.text


def test_callbacks_of_a_graph_that_raise_stop_neither_it_nor_others(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def raising(name: str) -> Callable[..., None]:
        def call(*error: Exception) -> None:
            told.append(name)
            raise ZeroDivisionError(name)

        return call

    scheduler, other = TransferScheduler(), Calls()
    for error in (None, OSError("EIO")):
        calls = Calls()
        calls.graph.on_ready, calls.graph.on_complete = raising("ready"), raising("complete")
        calls.graph.on_abort = raising("abort")
        calls.op("write", WRITE, calls.op("read", READ))
        scheduler.submit(calls.graph)
        while ops := list(scheduler.next_ops()):
            scheduler.finish(ops[0], error)
    other.op("write")
    scheduler.submit(other.graph)
    scheduler.finish(next(scheduler.next_ops()))
    assert told == ["ready", "complete", "ready", "abort"]
    assert other.told == ["ready", "write None", "complete"]
    assert caplog.text.count("callback of a graph") == 4
    assert not scheduler.graphs


def test_an_empty_graph_is_complete_at_once() -> None:
    calls = Calls()
    TransferScheduler().submit(calls.graph)
    assert calls.told == ["ready", "complete"]


def test_an_abort_ends_what_has_not_started() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    one = calls.op("one")
    calls.op("two")
    calls.op("last", JOIN, one)
    scheduler.submit(calls.graph)
    assert next(scheduler.next_ops()) is one
    scheduler.abort(calls.graph, OSError("closed"))
    assert calls.told == ["ready", "two closed", "last closed"]
    assert list(scheduler.next_ops()) == []
    scheduler.finish(one)
    assert calls.told[3:] == ["one None", "abort closed"]
    scheduler.abort(calls.graph, OSError("again"))
    assert len(calls.told) == 5


def test_misuse_is_refused() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    op = calls.op("one")
    with pytest.raises(ValueError, match="one graph"):
        Calls().op("other", WRITE, op)
    with pytest.raises(ValueError, match="one graph"):
        calls.graph.add_transfer_op(op)
    with pytest.raises(ValueError, match="before it is added"):
        op.add_predecessor(calls.op("two"))
    with pytest.raises(ValueError, match="0 blocks do not fit 1 buffers"):
        TransferOp(WRITE, [], [memoryview(b"")])
    with pytest.raises(ValueError, match="only a running operation"):
        scheduler.finish(op)
    scheduler.submit(calls.graph)
    with pytest.raises(ValueError, match="submitted already"):
        scheduler.submit(calls.graph)


def test_a_long_chain_needs_no_deep_stack() -> None:
    calls, scheduler = Calls(), TransferScheduler()
    op = calls.op("first", JOIN)
    for _ in range(5_000):
        op = calls.op("next", JOIN, op)
    scheduler.submit(calls.graph)
    assert len(calls.told) == 5_003


def test_the_scheduler_does_not_look_at_idle_graphs() -> None:
    """Graphs whose operations cannot be read are submitted, and others finish beside them."""
    scheduler = TransferScheduler()
    idle = [Calls() for _ in range(100)]
    for calls in idle:
        calls.op("second", WRITE, calls.op("first"))
        scheduler.submit(calls.graph)
    list(scheduler.next_ops())
    for calls in idle:
        calls.graph.ops = []
        del calls.graph.num_unfinished
    busy = Calls()
    op = busy.op("one")
    scheduler.submit(busy.graph)
    assert list(scheduler.next_ops()) == [op]
    scheduler.finish(op)
    assert busy.told == ["ready", "one None", "complete"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_callback_is_called_exactly_once(data: st.DataObject) -> None:
    scheduler, everyone, running = TransferScheduler(), list[tuple[Calls, int]](), list[TransferOp]()
    for _ in range(data.draw(st.integers(1, 3))):
        calls, ops = Calls(), list[TransferOp]()
        for number in range(data.draw(st.integers(0, 6))):
            after = data.draw(st.lists(st.sampled_from(ops), unique=True)) if ops else []
            kind = data.draw(st.sampled_from((WRITE, JOIN)))
            ops.append(calls.op(str(number), kind, *after, end=number == 3))
        scheduler.submit(calls.graph)
        everyone.append((calls, len(ops)))
        running += scheduler.next_ops()
    while running:
        op = running.pop(data.draw(st.integers(0, len(running) - 1)))
        error = data.draw(st.sampled_from((None, None, OSError("EIO"))))
        if data.draw(st.integers(0, 9)) == 0:
            assert op.graph is not None
            scheduler.abort(op.graph, OSError("aborted"))
        scheduler.finish(op, error)
        running += scheduler.next_ops()
    assert not scheduler.graphs
    for calls, count in everyone:
        ends = [line.split(" ")[0] for line in calls.told if line[0].isdigit()]
        assert sorted(ends) == sorted(map(str, range(count)))
        assert sum(line.startswith(("complete", "abort")) for line in calls.told) == 1
        failed = any(line[0].isdigit() and not line.endswith("None") for line in calls.told)
        assert calls.told[-1].startswith("abort" if failed else "complete")
        end = [line for line in calls.told if line.startswith("3 ")]
        assert calls.told.count("ready") == (not end or end == ["3 None"])
