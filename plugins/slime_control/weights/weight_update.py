"""State machine of weight updates that come in pieces: a state and an event in, the next state and effects out.

Trainers name the version with each piece (slime), with one piece, or by ``/update_weight_version`` after all pieces
(miles). Most trainers pause generation around all pieces; newer engines have calls for begin and end. No piece says
that it is the last one with weights. Pieces that name the same version are one update, even with other calls in
between. Exceptions: a begin or a piece of another version is in between, or no worker has all pieces at a close.

An event is a function of this module. It changes nothing, and gets all facts as arguments; ``missed`` is the last call
about weights that a worker missed. The caller keeps the state, and carries out all effects before the next event. In
the table, ``begin``, ``weights``, ``last`` and ``name`` mean :func:`sent` with a piece of that ``PieceKind``. ``took``
and ``failed`` mean :func:`answered`. :func:`close` comes when generation is paused or continues, memory is released or
resumed, all workers load from disk, the end of the update is announced, or no more pieces come for a time.

========== ================================== ========== ===============================================================
state      event                              next       effects
========== ================================== ========== ===============================================================
Idle       begin, weights                     Collecting
Idle       last, name, learnt, close          Idle
Collecting weights with its version or none   Collecting Missed: recipients that joined or may have restarted meanwhile,
                                                         and missed no call since the first piece
Collecting last, name                         Collecting as above
Collecting begin, weights of another version  Collecting as close; then a new update begins
Collecting close, a worker has all            Closed     Missed: workers that did not answer a piece; Completed: workers
                                                         that have all pieces, and had missed calls before; Unproven:
                                                         workers that joined since the first piece, and took no piece
Collecting close, no worker has all           Idle       Missed: workers that did not answer a piece
Closed     weights that name its version      Collecting as in Collecting: the update is open again
Closed     last                               Collecting as above
Closed     begin, other weights               Collecting a new update begins
Closed     name, close                        Closed
not Idle   learnt: the first version          same
not Idle   learnt: another one (``is_told``)  Collecting as close; then a new update begins
not Idle   learnt otherwise                   same
any        took                               same       Missed: this piece, if the worker joined after it was sent; or
                                                         the weights before the update, if the worker was not in use and
                                                         had missed no call, and this is its first piece of the update
                                                         or a piece of an update that is over
any        failed                             same       Missed, unless this or a later call is noted as missed already,
                                                         or the worker surely kept its weights, took no piece of the
                                                         update and missed no call
any        changed                            same
========== ================================== ========== ===============================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from router_core import Worker
from router_core.workers import WorkerChange
from slime_control.calls.endpoints import PieceKind
from slime_control.weights.missed_calls import MissedCall

__all__ = [
    "Closed", "Collecting", "Completed", "Effect", "Idle", "Missed", "Piece", "State", "Unproven", "Update", "answered",
    "changed", "close", "has_joined", "learnt", "sent",
]  # fmt: skip

_CURE = "; it comes back with all pieces of another update, or with an update from disk"


@dataclass(frozen=True, slots=True)
class Missed:
    """``worker`` lacks weights that were sent up to the call ``number``."""

    worker: Worker
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unproven(Missed):
    """An update that has just closed, and that ``worker`` may lack.

    The effect matters only if generation is paused at the close. ``version``: a worker that does not report this
    version gets no requests until it has the fleet's weights. If ``version`` is None, no report can show that the
    worker has the update, so the update counts as missed.
    """

    version: str | None


@dataclass(frozen=True, slots=True)
class Completed:
    """``worker`` has all of an update, which makes up for the calls that it missed before."""

    worker: Worker
    version: str | None


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of an update."""

    number: int
    path: str
    kind: PieceKind
    version: str | None = None
    is_delta: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Pieces that belong together.

    ``began``: the number of the first piece. ``before``: the fleet's version at that piece.
    ``is_rest``: the update may have begun before this process.
    ``is_guessed``: ``version`` is only what workers report, perhaps since before the update. A version that a piece
    names replaces it.
    ``is_delta``: the update changes present weights, so it does not give a worker all weights.
    ``takers``: workers that took a piece, each with True if one of its pieces brought weights.
    ``doubted``: takers that were quarantined, each with the number of the last call before the quarantine.
    ``awaited``: the answers that have not come yet, each as the number of the piece and the worker.
    """

    began: int
    before: str | None
    version: str | None = None
    is_rest: bool = False
    is_guessed: bool = False
    is_delta: bool = False
    takers: Mapping[Worker, bool] = field(default_factory=dict)
    doubted: Mapping[Worker, int] = field(default_factory=dict)
    awaited: frozenset[tuple[int, Worker]] = frozenset()


@dataclass(frozen=True, slots=True)
class Idle:
    """No update. ``is_first``: no close came yet, so a first piece may continue an update that an earlier process saw.

    ``joined``, in each state: by worker, the number of the last call before it registered.
    """

    joined: Mapping[Worker, int] = field(default_factory=dict)
    is_first: bool = False
    update: None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Collecting:
    """An update, of which more pieces may come."""

    joined: Mapping[Worker, int]
    update: Update


@dataclass(frozen=True, slots=True)
class Closed:
    """An update that is over, unless more of it comes."""

    joined: Mapping[Worker, int]
    update: Update


State = Idle | Collecting | Closed
Effect = Missed | Unproven | Completed
Step = tuple[State, list[Effect]]
Workers = Collection[Worker]
AllMissed = Mapping[Worker, MissedCall]


def has_joined(state: State, worker: Worker, number: int) -> bool:
    """Return True when ``worker`` registered during call ``number`` or later."""
    return state.joined.get(worker, 0) >= number


def sent(
    state: State, piece: Piece, to: Workers, restarted: Workers, fleet: str | None, missed: AllMissed
) -> Step:
    """Event: ``piece`` is about to go to the workers ``to``. If it belongs to an update, Collecting is next.

    ``restarted``: workers that may have restarted since they took a piece. ``fleet``: the fleet's version.
    """
    update, effects, is_weights = state.update, list[Effect](), piece.kind == "weights"
    if piece.kind == "begin" or (is_weights and not _continues(state, piece.version)):
        is_rest = is_weights and isinstance(state, Idle) and state.is_first
        effects = close(state, piece.number, missed)[1]
        update = Update(piece.number, fleet, is_rest=is_rest)
    elif update is None or (isinstance(state, Closed) and piece.kind == "name"):
        return state, []
    if piece.version is not None:
        update = replace(update, version=piece.version, is_guessed=False)
    awaited = update.awaited | {(piece.number, worker) for worker in to}
    update = replace(update, is_delta=update.is_delta or piece.is_delta, awaited=awaited)
    reason = f"it was not there for all pieces of an update{_CURE}"
    for worker in to:
        last = missed.get(worker)
        may_be_new = worker in update.doubted or (worker in update.takers and worker in restarted)
        lacks = may_be_new or has_joined(state, worker, update.began)
        if lacks and (last is None or last.number < update.began):
            effects.append(Missed(worker, piece.number - 1, reason))
    return Collecting(state.joined, update), effects  # even from Closed: trainers may pause around each piece


def _continues(state: State, version: str | None) -> bool:
    """Return True when weights that name ``version`` belong to the update of ``state``."""
    update = state.update
    if update is None or version is None or update.version is None or update.is_guessed:
        return isinstance(state, Collecting)
    return version == update.version


def answered(
    state: State, piece: Piece, worker: Worker, trouble: str | None, missed: MissedCall | None, *,
    in_use: bool, is_unchanged: bool,
) -> Step:  # fmt: skip
    """Event: ``worker`` took ``piece``, or failed it with ``trouble``. ``is_unchanged``: it surely kept its weights."""
    effects, update = list[Effect](), state.update
    if update is not None and piece.number < update.began:
        update = None  # the update of ``piece`` is over: at its close, workers without an answer missed it
    takers = {} if update is None else {**update.takers}
    if trouble is not None:
        is_known = missed is not None and missed.number >= piece.number
        if not is_known and not (is_unchanged and missed is None and worker not in takers):
            effects.append(Missed(worker, piece.number, f"{piece.path} failed: {trouble}{_CURE}"))
    elif has_joined(state, worker, piece.number):
        reason = f"it registered while a piece of an update was under way{_CURE}"
        effects.append(Missed(worker, piece.number, reason))
    elif piece.kind != "name":
        if not in_use and worker not in takers and missed is None:
            began = piece.number if update is None else update.began
            reason = "it was not in use, and has not all pieces of the update yet"
            effects.append(Missed(worker, began - 1, reason))
        takers[worker] = takers.get(worker, False) or piece.kind == "weights"
    if isinstance(state, Idle) or update is None:
        return state, effects
    awaited = update.awaited - {(piece.number, worker)}
    return replace(state, update=replace(update, takers=takers, awaited=awaited)), effects


def learnt(
    state: State, piece: Piece, version: str, by: Workers, fleet: str | None, number: int, missed: AllMissed, *,
    is_told: bool,
) -> Step:  # fmt: skip
    """Event: the workers ``by``, which took ``piece``, report ``version``. ``number``: the number of the last call.

    ``is_told``: ``piece`` surely brought this version. Otherwise the workers may have had it before ``piece``, too.
    """
    if isinstance(state, Idle) or piece.number < state.update.began:
        return state, []
    if state.update.version is None or state.update.is_guessed:
        update = replace(state.update, version=version, is_guessed=not is_told)
        return replace(state, update=update), []
    if version == state.update.version or not is_told:
        return state, []
    new = Update(piece.number, fleet, version, takers=dict.fromkeys(by, True))
    return Collecting(state.joined, new), close(state, number, missed)[1]


def close(state: State, number: int, missed: AllMissed) -> Step:
    """Event: no more pieces of the update are expected. ``number``: the number of the last call."""
    if not isinstance(state, Collecting):
        return Idle(state.joined) if isinstance(state, Idle) else state, []
    update = state.update
    late = {worker for _, worker in update.awaited}
    loaded = [worker for worker, is_loaded in update.takers.items() if is_loaded and worker not in late]
    whole = [worker for worker in loaded if _has_all(update, missed.get(worker))]
    reason = f"it has not answered a piece of an update that is over{_CURE}"
    effects: list[Effect] = [Missed(worker, number, reason) for worker in late]
    if not whole:
        return Idle(state.joined), effects  # the same version may be tried again
    named = update.version or update.before
    effects += [Completed(worker, named) for worker in whole if worker in missed]
    proof = update.version if update.version != update.before else None
    reason = f"it registered during an update, and has not taken it{_CURE}"
    joined = [worker for worker in state.joined if has_joined(state, worker, update.began)]
    effects += [Unproven(worker, number, reason, proof) for worker in joined if worker not in update.takers]
    return Closed(state.joined, update), effects


def _has_all(update: Update, missed: MissedCall | None) -> bool:
    if missed is None:
        return True
    if missed.version is not None and (update.is_rest or update.version in (None, missed.version)):
        return False  # this update may be the one that the worker missed
    return missed.number < update.began and not update.is_delta


def changed(state: State, worker: Worker, change: WorkerChange | Literal["cured"], number: int) -> Step:
    """Event: ``worker`` changed after call ``number``. ``cured``: that call, which is no piece, gave it all weights.

    A worker that is added or was quarantined may be another process than before.
    """
    joined, is_reset = {**state.joined}, change in ("added", "removed")
    if is_reset or (change == "cured" and joined.get(worker, number) < number):
        joined.pop(worker, None)
    if change == "added":
        joined[worker] = number
    if isinstance(state, Idle):
        return replace(state, joined=joined), []
    takers, doubted = {**state.update.takers}, {**state.update.doubted}
    if change == "quarantined" and worker in takers:
        doubted[worker] = number
    if is_reset or (change == "cured" and doubted.get(worker, number) < number):
        doubted.pop(worker, None)
    if is_reset:
        takers.pop(worker, None)
    return replace(state, joined=joined, update=replace(state.update, takers=takers, doubted=doubted)), []
