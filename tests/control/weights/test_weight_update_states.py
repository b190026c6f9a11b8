"""The state machine of weight updates in pieces: a test for each row of its table."""

from __future__ import annotations

import pytest

from router_core import Worker
from slime_control.calls.endpoints import PieceKind
from slime_control.weights.missed_calls import MissedCall
from slime_control.weights.weight_update import Completed, Effect, Missed, Piece, Standing, Unproven, Updates

A, B = Worker("http://a"), Worker("http://b")
CURE = "; it comes back with all pieces of another update, or with an update from disk"
ABSENT = f"it was not there for all pieces of an update{CURE}"
LATE = f"it has not answered a piece of an update that is over{CURE}"
NEW = f"it registered during an update, and has not taken it{CURE}"


class Machine:
    """The machine, and what it asks for: the ``missed`` calls, and the workers that ``restarted`` perhaps."""

    def __init__(self) -> None:
        self.missed: dict[Worker, MissedCall] = {}
        self.restarted: set[Worker] = set()
        self.updates = Updates(self.missed.get, self._may_be_restarted)
        self.fleet: str | None = "1"

    def _may_be_restarted(self, worker: Worker, _: Standing | None) -> bool:
        return worker in self.restarted

    @property
    def state(self) -> str:
        current = self.updates.current
        if current is None:
            return "Idle"
        return "Closed" if current.is_closed else "Collecting"

    def send(
        self, kind: PieceKind, version: str | None = None, *to: Worker, is_delta: bool = False
    ) -> tuple[Piece, bool, list[Effect]]:
        piece = Piece(self.updates.count(), f"/{kind}", kind, version, is_delta)
        is_piece, effects = self.updates.receive(piece, to or (A,), self.fleet, 0.0)
        return piece, is_piece, effects

    def take(self, piece: Piece, worker: Worker = A, *, in_use: bool = True) -> list[Effect]:
        self.updates.answered(piece, worker, 1.0)
        return self.updates.took(piece, worker, in_use=in_use)

    def fail(self, piece: Piece, worker: Worker = A, *, is_unchanged: bool = False) -> list[Effect]:
        self.updates.answered(piece, worker, 1.0)
        return self.updates.failed(piece, worker, "no", is_unchanged=is_unchanged)

    def piece(self, kind: PieceKind = "weights", version: str | None = None) -> list[Effect]:
        """A piece that A takes; the effects of its receipt."""
        piece, _, effects = self.send(kind, version)
        assert self.take(piece) == []
        return effects


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("kind", ["begin", "weights"])
def test_idle_begin_or_weights_collects(machine: Machine, kind: PieceKind) -> None:
    _, is_piece, effects = machine.send(kind, "2")
    assert (machine.state, is_piece, effects) == ("Collecting", True, [])


@pytest.mark.parametrize("kind", ["last", "name"])
def test_idle_last_or_name_is_no_piece(machine: Machine, kind: PieceKind) -> None:
    _, is_piece, effects = machine.send(kind)
    assert (machine.state, is_piece, effects) == ("Idle", False, [])


def test_idle_close_stays_idle(machine: Machine) -> None:
    assert (machine.updates.close(), machine.state) == ([], "Idle")


@pytest.mark.parametrize("version", ["2", None])
@pytest.mark.parametrize("kind", ["weights", "last", "name"])
def test_collecting_further_piece_keeps_update(
    machine: Machine, kind: PieceKind, version: str | None
) -> None:
    machine.piece(version="2")
    first = machine.updates.current
    assert machine.piece(kind, version) == []
    assert (machine.state, machine.updates.current) == ("Collecting", first)


@pytest.mark.parametrize("event", ["joined", "doubted", "restarted"])
def test_collecting_further_piece_misses_workers_that_may_be_new(machine: Machine, event: str) -> None:
    machine.piece(version="2")
    if event == "restarted":
        machine.restarted.add(A)
    else:
        getattr(machine.updates, event)(A)
    piece, _, effects = machine.send("weights", "2")
    assert effects == [Missed(A, 1, ABSENT)]
    machine.missed[A] = MissedCall(1)
    machine.take(piece)
    assert machine.piece(version="2") == []  # that is known now


@pytest.mark.parametrize(("kind", "version"), [("begin", None), ("weights", "3")])
def test_collecting_another_update_closes_the_former(
    machine: Machine, kind: PieceKind, version: str | None
) -> None:
    machine.missed[A] = MissedCall(0)
    machine.piece(version="2")
    first = machine.updates.current
    assert machine.piece(kind, version) == [Completed(A, "2")]
    assert machine.state == "Collecting"
    assert machine.updates.current is not first


def test_collecting_learnt_version_names_unnamed_update(machine: Machine) -> None:
    piece, _, _ = machine.send("weights")
    machine.take(piece)
    assert machine.updates.learnt(piece, "2", [A], "1", 1.0, is_told=False) == []
    current = machine.updates.current
    assert current is not None
    assert (machine.state, current.version, current.is_guessed) == ("Collecting", "2", True)
    machine.piece(version="3")  # a guess gives way to a name
    assert (machine.updates.current, current.version, current.is_guessed) == (current, "3", False)


@pytest.mark.parametrize("is_told", [True, False])
def test_collecting_learnt_version_divides_updates_when_told(machine: Machine, is_told: bool) -> None:
    machine.missed[A] = MissedCall(0)
    machine.piece(version="2")
    first = machine.updates.current
    piece, _, _ = machine.send("weights")
    machine.take(piece)
    effects = machine.updates.learnt(piece, "3", [A], "2", 1.0, is_told=is_told)
    assert effects == ([Completed(A, "2")] if is_told else [])
    assert (machine.state, machine.updates.current is first) == ("Collecting", not is_told)


def test_collecting_close_with_complete_worker_is_closed(machine: Machine) -> None:
    machine.missed[A] = MissedCall(0)
    piece, _, _ = machine.send("weights", "2", A, B)
    machine.take(piece)
    joined = Worker("http://c")
    machine.updates.joined(joined)
    assert machine.updates.close() == [
        Missed(B, 1, LATE), Completed(A, "2"), Unproven(joined, 1, NEW, "2")
    ]  # fmt: skip
    assert machine.state == "Closed"


@pytest.mark.parametrize("named", [None, "1"])
def test_collecting_close_without_another_version_proves_nothing(machine: Machine, named: str | None) -> None:
    machine.piece(version=named)
    machine.updates.joined(B)
    assert machine.updates.close() == [Unproven(B, 1, NEW, None)]


@pytest.mark.parametrize("reason", ["a piece", "begin alone", "a delta", "the missed version", "the rest"])
def test_collecting_close_without_complete_worker_is_idle(machine: Machine, reason: str) -> None:
    machine.missed[A] = MissedCall(0)
    if reason == "a piece":
        machine.missed[A] = MissedCall(1)
    elif reason in ("the missed version", "the rest"):
        machine.missed[A] = MissedCall(0, "2" if reason == "the missed version" else "1")
    if reason == "the missed version":
        machine.updates.close()  # so it is not the rest of one
    kind: PieceKind = "begin" if reason == "begin alone" else "weights"
    piece, _, _ = machine.send(kind, "2" if kind == "weights" else None, is_delta=reason == "a delta")
    machine.take(piece)
    assert (machine.updates.close(), machine.state) == ([], "Idle")


def test_collecting_close_before_any_answer_is_idle(machine: Machine) -> None:
    machine.send("weights", "2")
    assert (machine.updates.close(), machine.state) == ([Missed(A, 1, LATE)], "Idle")


@pytest.mark.parametrize(("kind", "version"), [("weights", "2"), ("last", None)])
def test_closed_further_piece_opens_again(machine: Machine, kind: PieceKind, version: str | None) -> None:
    machine.piece(version="2")
    first = machine.updates.current
    machine.updates.close()
    machine.updates.joined(A)
    _, is_piece, effects = machine.send(kind, version)
    assert (is_piece, effects) == (True, [Missed(A, 1, ABSENT)])
    assert (machine.state, machine.updates.current) == ("Collecting", first)


@pytest.mark.parametrize(("kind", "version"), [("begin", None), ("weights", None), ("weights", "3")])
def test_closed_other_weights_begin_an_update(machine: Machine, kind: PieceKind, version: str | None) -> None:
    machine.piece(version="2")
    first = machine.updates.current
    machine.updates.close()
    assert machine.piece(kind, version) == []
    assert machine.state == "Collecting"
    assert machine.updates.current is not first


def test_closed_name_or_close_stays_closed(machine: Machine) -> None:
    machine.piece(version="2")
    machine.updates.close()
    _, is_piece, effects = machine.send("name", "2")
    assert (is_piece, effects, machine.updates.close(), machine.state) == (False, [], [], "Closed")


@pytest.mark.parametrize("is_closed", [False, True])
def test_taken_piece_is_missed_by_workers_that_may_lack_others(machine: Machine, is_closed: bool) -> None:
    piece, _, _ = machine.send("weights", "2", A, B)
    machine.updates.joined(A)
    if is_closed:
        machine.updates.close()
    state = machine.state
    joined = f"it registered while a piece of an update was under way{CURE}"
    assert machine.take(piece, A) == [Missed(A, 1, joined)]
    unused = "it was not in use, and has not all pieces of the update yet"
    assert machine.take(piece, B, in_use=False) == [Missed(B, 0, unused)]
    assert machine.state == state


def test_failed_piece_is_missed(machine: Machine) -> None:
    piece, _, _ = machine.send("weights", "2")
    failed = Missed(A, 1, f"/weights failed: no{CURE}")
    assert machine.fail(piece, is_unchanged=True) == []
    assert machine.fail(piece) == [failed]
    machine.missed[A] = MissedCall(1)
    assert machine.fail(piece) == []  # that is known
    machine.missed[A] = MissedCall(0)
    assert machine.fail(piece, is_unchanged=True) == [failed]
    assert machine.state == "Collecting"


def test_refused_piece_is_missed_by_workers_that_took_others(machine: Machine) -> None:
    machine.piece(version="2")
    piece, _, _ = machine.send("weights", "2")
    assert machine.fail(piece, is_unchanged=True) == [Missed(A, 2, f"/weights failed: no{CURE}")]


def test_workers_that_leave_are_forgotten(machine: Machine) -> None:
    machine.piece(version="2")
    for event in (machine.updates.joined, machine.updates.doubted, machine.updates.left):
        event(A)
        assert machine.state == "Collecting"
    assert not machine.updates.joined_since(A, 1)
    assert (machine.updates.close(), machine.state) == ([], "Idle")


def test_cured_workers_are_no_newcomers_unless_they_joined_later(machine: Machine) -> None:
    machine.piece(version="2")
    machine.updates.joined(B)
    machine.updates.cured(B, 1)
    assert machine.updates.joined_since(B, 1)  # it registered during that call
    machine.updates.cured(B, 2)
    assert (machine.updates.joined_since(B, 1), machine.state) == (False, "Collecting")


def test_cured_workers_are_trusted_unless_they_were_quarantined_later(machine: Machine) -> None:
    machine.piece(version="2")
    machine.updates.doubted(A)
    machine.updates.cured(A, 1)  # it was quarantined during that call or after it
    assert machine.piece(version="2") == [Missed(A, 1, ABSENT)]
    machine.updates.cured(A, machine.updates.count())
    assert machine.piece(version="2") == []
