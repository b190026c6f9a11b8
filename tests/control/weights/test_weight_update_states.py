"""The state machine of weight updates in pieces: its whole table, and a test for the effects of each row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router_core import Worker
from slime_control.calls.endpoints import PieceKind
from slime_control.weights import weight_update
from slime_control.weights.missed_calls import MissedCall
from slime_control.weights.weight_update import (
    Closed,
    Collecting,
    Completed,
    Effect,
    Idle,
    Missed,
    Piece,
    State,
    Step,
    Unproven,
    Update,
    has_joined,
)

A, B = Worker("http://a"), Worker("http://b")
CURE = "; it comes back with all pieces of another update, or with an update from disk"
ABSENT = f"it was not there for all pieces of an update{CURE}"
LATE = f"it has not answered a piece of an update that is over{CURE}"
NEW = f"it registered during an update, and has not taken it{CURE}"


class Machine:
    """The state, and the facts of events: the ``missed`` calls, and the workers that ``restarted`` perhaps."""

    def __init__(self) -> None:
        self.state: State = Idle(is_first=True)
        self.calls = 0
        self.missed: dict[Worker, MissedCall] = {}
        self.restarted: set[Worker] = set()

    @property
    def name(self) -> str:
        return type(self.state).__name__

    @property
    def update(self) -> Update:
        assert self.state.update is not None
        return self.state.update

    def _keep(self, step: Step) -> list[Effect]:
        self.state, effects = step
        return effects

    def send(
        self, kind: PieceKind, version: str | None = None, *to: Worker, is_delta: bool = False
    ) -> tuple[Piece, list[Effect]]:
        self.calls += 1
        piece = Piece(self.calls, f"/{kind}", kind, version, is_delta)
        step = weight_update.sent(self.state, piece, to or (A,), self.restarted, "1", self.missed)
        return piece, self._keep(step)

    def take(self, piece: Piece, worker: Worker = A, *, in_use: bool = True) -> list[Effect]:
        missed = self.missed.get(worker)
        step = weight_update.answered(
            self.state, piece, worker, None, missed, in_use=in_use, is_unchanged=False
        )
        return self._keep(step)

    def fail(self, piece: Piece, worker: Worker = A, *, is_unchanged: bool = False) -> list[Effect]:
        missed = self.missed.get(worker)
        step = weight_update.answered(
            self.state, piece, worker, "no", missed, in_use=True, is_unchanged=is_unchanged
        )
        return self._keep(step)

    def learn(self, piece: Piece, version: str, *, is_told: bool = True) -> list[Effect]:
        step = weight_update.learnt(
            self.state, piece, version, [A], "1", self.calls, self.missed, is_told=is_told
        )
        return self._keep(step)

    def close(self) -> list[Effect]:
        return self._keep(weight_update.close(self.state, self.calls, self.missed))

    def joined(self, worker: Worker) -> None:
        assert self._keep(weight_update.changed(self.state, worker, "added", self.calls)) == []

    def left(self, worker: Worker) -> None:
        assert self._keep(weight_update.changed(self.state, worker, "removed", self.calls)) == []

    def doubted(self, worker: Worker) -> None:
        assert self._keep(weight_update.changed(self.state, worker, "quarantined", self.calls)) == []

    def cured(self, worker: Worker, number: int) -> None:
        assert self._keep(weight_update.changed(self.state, worker, "cured", number)) == []

    def piece(self, kind: PieceKind = "weights", version: str | None = None) -> list[Effect]:
        """A piece that A takes; the effects of its receipt."""
        piece, effects = self.send(kind, version)
        assert self.take(piece) == []
        return effects


@pytest.fixture
def machine() -> Machine:
    return Machine()


#: Piece 1 belongs to an earlier update. Piece 2, which A has taken, began the state's update, at the fleet's version 0.
EARLIER, FIRST = Piece(1, "/weights", "weights"), Piece(2, "/weights", "weights")
NAMED, UNNAMED = Update(2, "0", "2", takers={A: True}), Update(2, "0", takers={A: True})
STATES: dict[str, State] = {"Idle": Idle(), "Collecting": Collecting({}, NAMED), "Closed": Closed({}, NAMED)}
#: The next state from each of ``STATES``, by event; ``New``: Collecting with a new update.
TABLE: dict[str, tuple[Callable[[Machine], object], str, str, str]] = {
    "begin": (lambda machine: machine.send("begin"), "New", "New", "New"),
    "weights, same version": (lambda machine: machine.send("weights", "2"), "New", "Collecting", "Collecting"),
    "weights, no version": (lambda machine: machine.send("weights"), "New", "Collecting", "New"),
    "weights, another version": (lambda machine: machine.send("weights", "3"), "New", "New", "New"),
    "last": (lambda machine: machine.send("last"), "Idle", "Collecting", "Collecting"),
    "name": (lambda machine: machine.send("name", "2"), "Idle", "Collecting", "Closed"),
    "took": (lambda machine: machine.take(FIRST), "Idle", "Collecting", "Closed"),
    "failed": (lambda machine: machine.fail(FIRST), "Idle", "Collecting", "Closed"),
    "learnt the same": (lambda machine: machine.learn(FIRST, "2"), "Idle", "Collecting", "Closed"),
    "learnt another, told": (lambda machine: machine.learn(FIRST, "3"), "Idle", "New", "New"),
    "learnt another, not told": (
        lambda machine: machine.learn(FIRST, "3", is_told=False), "Idle", "Collecting", "Closed",
    ),
    "learnt of an earlier update": (
        lambda machine: machine.learn(EARLIER, "3"), "Idle", "Collecting", "Closed",
    ),
    "close": (lambda machine: machine.close(), "Idle", "Closed", "Closed"),
    "added": (lambda machine: machine.joined(A), "Idle", "Collecting", "Closed"),
    "removed": (lambda machine: machine.left(A), "Idle", "Collecting", "Closed"),
    "quarantined": (lambda machine: machine.doubted(A), "Idle", "Collecting", "Closed"),
    "cured": (lambda machine: machine.cured(A, 1), "Idle", "Collecting", "Closed"),
}  # fmt: skip


@pytest.mark.parametrize("event", TABLE)
@pytest.mark.parametrize("state", STATES)
def test_each_event_in_each_state_leads_to_the_next_state(machine: Machine, state: str, event: str) -> None:
    call, *following = TABLE[event]
    machine.state, machine.calls = STATES[state], 2
    before = repr(machine.state)
    call(machine)
    update = machine.state.update
    is_new = update is not None and update.before == "1"
    wanted = following[list(STATES).index(state)]
    assert (machine.name, is_new) == ("Collecting" if wanted == "New" else wanted, wanted == "New")
    assert repr(STATES[state]) == before  # no event changes a state in place


@pytest.mark.parametrize("is_closed", [False, True])
def test_learnt_version_names_an_update_without_one(machine: Machine, is_closed: bool) -> None:
    machine.state = Closed({}, UNNAMED) if is_closed else Collecting({}, UNNAMED)
    assert machine.learn(FIRST, "2") == []
    assert (machine.name, machine.update.version) == ("Closed" if is_closed else "Collecting", "2")


@pytest.mark.parametrize("name", STATES)
def test_answers_to_a_piece_of_an_earlier_update_change_no_state(machine: Machine, name: str) -> None:
    machine.state = STATES[name]
    assert machine.take(EARLIER) == machine.fail(EARLIER, is_unchanged=True) == []
    assert machine.fail(EARLIER) == [Missed(A, 1, f"/weights failed: no{CURE}")]
    unused = "it was not in use, and has not all pieces of the update yet"
    assert machine.take(EARLIER, in_use=False) == [Missed(A, 0, unused)]
    assert machine.state == STATES[name]


@pytest.mark.parametrize("kind", ["begin", "weights"])
def test_idle_begin_or_weights_collects(machine: Machine, kind: PieceKind) -> None:
    _, effects = machine.send(kind, "2")
    assert (machine.name, effects) == ("Collecting", [])


@pytest.mark.parametrize("kind", ["last", "name"])
def test_idle_last_or_name_is_no_piece(machine: Machine, kind: PieceKind) -> None:
    _, effects = machine.send(kind)
    assert (machine.name, effects) == ("Idle", [])


def test_idle_close_stays_idle(machine: Machine) -> None:
    assert (machine.close(), machine.name) == ([], "Idle")


@pytest.mark.parametrize("version", ["2", None])
@pytest.mark.parametrize("kind", ["weights", "last", "name"])
def test_collecting_further_piece_keeps_update(
    machine: Machine, kind: PieceKind, version: str | None
) -> None:
    machine.piece(version="2")
    assert machine.piece(kind, version) == []
    assert (machine.name, machine.update.began) == ("Collecting", 1)


@pytest.mark.parametrize("event", ["joined", "doubted", "restarted"])
def test_collecting_further_piece_misses_workers_that_may_be_new(machine: Machine, event: str) -> None:
    machine.piece(version="2")
    if event == "restarted":
        machine.restarted.add(A)
    else:
        getattr(machine, event)(A)
    piece, effects = machine.send("weights", "2")
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
    assert machine.piece(kind, version) == [Completed(A, "2")]
    assert (machine.name, machine.update.began) == ("Collecting", 2)


def test_collecting_learnt_version_names_unnamed_update(machine: Machine) -> None:
    piece, _ = machine.send("weights")
    machine.take(piece)
    assert machine.learn(piece, "2", is_told=False) == []
    assert (machine.name, machine.update.version, machine.update.is_guessed) == ("Collecting", "2", True)
    machine.piece(version="3")  # a guess gives way to a name
    assert (machine.update.began, machine.update.version, machine.update.is_guessed) == (1, "3", False)


@pytest.mark.parametrize("is_told", [True, False])
def test_collecting_learnt_version_divides_updates_when_told(machine: Machine, is_told: bool) -> None:
    machine.missed[A] = MissedCall(0)
    machine.piece(version="2")
    piece, _ = machine.send("weights")
    machine.take(piece)
    effects = machine.learn(piece, "3", is_told=is_told)
    assert effects == ([Completed(A, "2")] if is_told else [])
    assert (machine.name, machine.update.began) == ("Collecting", 2 if is_told else 1)


def test_collecting_close_with_complete_worker_is_closed(machine: Machine) -> None:
    machine.missed[A] = MissedCall(0)
    piece, _ = machine.send("weights", "2", A, B)
    machine.take(piece)
    joined = Worker("http://c")
    machine.joined(joined)
    assert machine.close() == [
        Missed(B, 1, LATE), Completed(A, "2"), Unproven(joined, 1, NEW, "2")
    ]  # fmt: skip
    assert machine.name == "Closed"


@pytest.mark.parametrize("named", [None, "1"])
def test_collecting_close_without_another_version_proves_nothing(machine: Machine, named: str | None) -> None:
    machine.joined(Worker("http://c"))  # before the update: it is no newcomer
    machine.piece(version=named)
    machine.joined(B)
    assert machine.close() == [Unproven(B, 1, NEW, None)]


@pytest.mark.parametrize("reason", ["a piece", "begin alone", "a delta", "the missed version", "the rest"])
def test_collecting_close_without_complete_worker_is_idle(machine: Machine, reason: str) -> None:
    machine.missed[A] = MissedCall(0)
    if reason == "a piece":
        machine.missed[A] = MissedCall(1)
    elif reason in ("the missed version", "the rest"):
        machine.missed[A] = MissedCall(0, "2" if reason == "the missed version" else "1")
    if reason == "the missed version":
        machine.close()  # so it is not the rest of one
    kind: PieceKind = "begin" if reason == "begin alone" else "weights"
    piece, _ = machine.send(kind, "2" if kind == "weights" else None, is_delta=reason == "a delta")
    machine.take(piece)
    assert (machine.close(), machine.name) == ([], "Idle")


def test_weights_after_a_first_close_are_no_rest_of_an_older_update(machine: Machine) -> None:
    machine.close()
    machine.missed[A] = MissedCall(0, "1")
    machine.piece(version="2")
    assert (machine.close(), machine.name) == ([Completed(A, "2")], "Closed")


def test_collecting_close_before_any_answer_is_idle(machine: Machine) -> None:
    machine.send("weights", "2")
    assert (machine.close(), machine.name) == ([Missed(A, 1, LATE)], "Idle")


@pytest.mark.parametrize(("kind", "version"), [("weights", "2"), ("last", None)])
def test_closed_further_piece_opens_again(machine: Machine, kind: PieceKind, version: str | None) -> None:
    machine.piece(version="2")
    machine.close()
    machine.joined(A)
    _, effects = machine.send(kind, version)
    assert effects == [Missed(A, 1, ABSENT)]
    assert (machine.name, machine.update.began) == ("Collecting", 1)


@pytest.mark.parametrize(("kind", "version"), [("begin", None), ("weights", None), ("weights", "3")])
def test_closed_other_weights_begin_an_update(machine: Machine, kind: PieceKind, version: str | None) -> None:
    machine.piece(version="2")
    machine.close()
    assert machine.piece(kind, version) == []
    assert (machine.name, machine.update.began) == ("Collecting", 2)


def test_closed_name_or_close_stays_closed(machine: Machine) -> None:
    machine.piece(version="2")
    machine.close()
    _, effects = machine.send("name", "2")
    assert (effects, machine.close(), machine.name) == ([], [], "Closed")


@pytest.mark.parametrize("is_closed", [False, True])
def test_taken_piece_is_missed_by_workers_that_may_lack_others(machine: Machine, is_closed: bool) -> None:
    piece, _ = machine.send("weights", "2", A, B)
    machine.joined(A)
    if is_closed:
        machine.close()
    name = machine.name
    joined = f"it registered while a piece of an update was under way{CURE}"
    assert machine.take(piece, A) == [Missed(A, 1, joined)]
    unused = "it was not in use, and has not all pieces of the update yet"
    assert machine.take(piece, B, in_use=False) == [Missed(B, 0, unused)]
    assert machine.name == name


def test_failed_piece_is_missed(machine: Machine) -> None:
    piece, _ = machine.send("weights", "2")
    failed = Missed(A, 1, f"/weights failed: no{CURE}")
    assert machine.fail(piece, is_unchanged=True) == []
    assert machine.fail(piece) == [failed]
    machine.missed[A] = MissedCall(1)
    assert machine.fail(piece) == []  # that is known
    machine.missed[A] = MissedCall(0)
    assert machine.fail(piece, is_unchanged=True) == [failed]
    assert machine.name == "Collecting"


def test_refused_piece_is_missed_by_workers_that_took_others(machine: Machine) -> None:
    machine.piece(version="2")
    piece, _ = machine.send("weights", "2")
    assert machine.fail(piece, is_unchanged=True) == [Missed(A, 2, f"/weights failed: no{CURE}")]


def test_workers_that_leave_are_forgotten(machine: Machine) -> None:
    machine.piece(version="2")
    for event in (machine.joined, machine.doubted, machine.left):
        event(A)
        assert machine.name == "Collecting"
    assert not has_joined(machine.state, A, 1)
    assert (machine.close(), machine.name) == ([], "Idle")


def test_cured_workers_are_no_newcomers_unless_they_joined_later(machine: Machine) -> None:
    machine.piece(version="2")
    machine.joined(B)
    machine.cured(B, 1)
    assert has_joined(machine.state, B, 1)  # it registered during that call
    machine.cured(B, 2)
    assert (has_joined(machine.state, B, 1), machine.name) == (False, "Collecting")


def test_cured_workers_are_trusted_unless_they_were_quarantined_later(machine: Machine) -> None:
    machine.piece(version="2")
    machine.doubted(A)
    machine.cured(A, 1)  # it was quarantined during that call or after it
    assert machine.piece(version="2") == [Missed(A, 1, ABSENT)]
    machine.cured(A, 3)
    assert machine.piece(version="2") == []
