"""State machine of weight updates that come in pieces: one event in, the next state and a list of effects out.

Trainers name the version with each piece (slime), with one piece, or by ``/update_weight_version`` after all pieces
(miles). Most trainers pause generation around all pieces; newer engines get calls for begin and end. No piece says that
it is the last one with weights. Pieces that name the same version are one update, even with other calls in between.
Exceptions: a begin or a piece of another version is in between, or no worker has all pieces at a close.

There is no router, clock or I/O here: the caller passes the time, and carries out all effects before the next event.
The event of a piece is its kind, see :data:`~slime_control.calls.endpoints.PieceKind`. ``close``: generation is paused
or continues, memory is released or resumed, all workers load from disk, the end is announced, or no piece follows.

========== ================================== ========== ===============================================================
state      event                              next       effects
========== ================================== ========== ===============================================================
Idle       begin, weights                     Collecting
Idle       last, name, close                  Idle
Collecting weights with its version or none   Collecting Missed: recipients that joined or may have restarted meanwhile
Collecting last, name                         Collecting as above
Collecting begin, weights of another version  Collecting as close; then a new update begins
Collecting learnt: the first version          Collecting
Collecting learnt: another one (``is_told``)  Collecting as close; then a new update begins
Collecting close, a worker has all            Closed     Missed: workers that did not answer a piece; Completed: workers
                                                         that have all pieces, and had missed calls before; Unproven:
                                                         workers that joined since the first piece, and took no piece
Collecting close, no worker has all           Idle       Missed: workers that did not answer a piece
Closed     weights that name its version      Collecting as in Collecting: the update is open again
Closed     last                               Collecting as above
Closed     begin, other weights               Collecting a new update begins
Closed     name, close                        Closed
any        took                               same       Missed: this piece, if the worker joined after it was sent;
                                                         the weights before the update, if the worker was not in use
                                                         when it took its first piece
any        failed                             same       Missed, unless the worker surely kept its weights, and had
                                                         taken no piece and missed no call before
any        joined, left, doubted, cured       same
========== ================================== ========== ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router_core import Worker
from slime_control.calls.endpoints import PieceKind
from slime_control.weights.missed_calls import MissedCall

__all__ = ["Completed", "Effect", "Missed", "Piece", "Standing", "Unproven", "Update", "Updates"]

#: State of a worker and the reason for it.
Standing = tuple[str, str | None]
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
    version gets no requests until it has the fleet's weights. None: no report can show that the worker has the update,
    so the update counts as missed.
    """

    version: str | None


@dataclass(frozen=True, slots=True)
class Completed:
    """``worker`` has all of an update, which makes up for the calls that it missed before."""

    worker: Worker
    version: str | None


Effect = Missed | Unproven | Completed


@dataclass(eq=False, slots=True)
class Update:
    """Pieces that belong together.

    ``began``: the number of the first piece. ``before``: the fleet's version at that piece.
    ``is_rest``: the update may have begun before this process.
    ``is_guessed``: ``version`` is only what workers report, perhaps since before the update. A version that a piece
    names replaces it.
    ``is_delta``: the update changes present weights, so it does not give a worker all weights.
    ``takers``: workers that took a piece, each with its standing afterwards. ``loaded``: workers that took weights.
    ``doubted``: takers that were quarantined, each with the number of the last call before the quarantine.
    ``awaited``: the answers that have not come yet, each as the number of the piece and the worker.
    """

    began: int
    before: str | None
    last_answer_at: float
    version: str | None = None
    is_rest: bool = False
    is_guessed: bool = False
    is_delta: bool = False
    is_closed: bool = False
    takers: dict[Worker, Standing | None] = field(default_factory=dict)
    loaded: set[Worker] = field(default_factory=set)
    doubted: dict[Worker, int] = field(default_factory=dict)
    awaited: set[tuple[int, Worker]] = field(default_factory=set)

    def includes(self, version: str | None) -> bool:
        """Return True when weights that name ``version`` belong to this update."""
        if version is None or self.version is None or self.is_guessed:
            return not self.is_closed
        return version == self.version


@dataclass(eq=False, slots=True)
class Piece:
    """One call of an update. :meth:`Updates.receive` sets ``update``."""

    number: int
    path: str
    kind: PieceKind
    version: str | None = None
    is_delta: bool = False
    update: Update = field(init=False, repr=False)


class Updates:
    """The update that pieces belong to now, and the workers that registered meanwhile.

    ``missed`` returns the last call about weights that a worker missed. ``may_be_restarted`` guesses whether a taker
    has restarted.
    """

    def __init__(
        self,
        missed: Callable[[Worker], MissedCall | None],
        may_be_restarted: Callable[[Worker, Standing | None], bool],
    ) -> None:
        self.current: Update | None = None
        self._missed = missed
        self._may_be_restarted = may_be_restarted
        self._calls = 0
        self._is_first = True  # ``close`` was not called yet: a first piece may continue an older update
        self._joined: dict[Worker, int] = {}  # by worker: the number of the last call before it registered

    def count(self) -> int:
        """Return the number of a new call."""
        self._calls += 1
        return self._calls

    def joined(self, worker: Worker) -> None:
        """Note a registration, after :meth:`left`: ``worker`` may be another process than before."""
        self._joined[worker] = self._calls

    def left(self, worker: Worker) -> None:
        self._joined.pop(worker, None)
        if self.current is not None:
            self.current.takers.pop(worker, None)
            self.current.loaded.discard(worker)
            self.current.doubted.pop(worker, None)

    def doubted(self, worker: Worker) -> None:
        """Note a quarantine: ``worker`` may be another process when it comes back."""
        if self.current is not None and worker in self.current.takers:
            self.current.doubted[worker] = self._calls

    def cured(self, worker: Worker, number: int) -> None:
        """Note that ``worker`` got all weights by call ``number``, which is no piece."""
        if not self.joined_since(worker, number):
            self._joined.pop(worker, None)
        if self.current is not None and self.current.doubted.get(worker, number) < number:
            del self.current.doubted[worker]

    def joined_since(self, worker: Worker, number: int) -> bool:
        """Return True when ``worker`` registered during call ``number`` or later."""
        return self._joined.get(worker, 0) >= number

    def receive(
        self, piece: Piece, to: Iterable[Worker], fleet: str | None, now: float
    ) -> tuple[bool, list[Effect]]:
        """Note that ``piece`` goes to the workers ``to``. ``fleet``: the fleet's version.

        Returns False if ``piece`` belongs to no update, and the effects.
        """
        update, effects = self.current, list[Effect]()
        is_weights = piece.kind == "weights"
        if piece.kind == "begin" or (is_weights and (update is None or not update.includes(piece.version))):
            is_rest = self._is_first and is_weights
            effects = self.close()
            update = self.current = Update(piece.number, fleet, now, is_rest=is_rest)
        elif update is None or (update.is_closed and piece.kind == "name"):
            return False, effects
        piece.update = update
        if piece.version is not None:
            update.version, update.is_guessed = piece.version, False
        update.is_delta |= piece.is_delta
        update.is_closed = False  # trainers may pause around each piece
        for worker in to:
            update.awaited.add((piece.number, worker))
            if self._lacks(update, worker):
                reason = f"it was not there for all pieces of an update{_CURE}"
                effects.append(Missed(worker, piece.number - 1, reason))
        return True, effects

    def answered(self, piece: Piece, worker: Worker, now: float) -> None:
        """Note that ``worker`` has answered ``piece``, or failed to; :meth:`took` or :meth:`failed` follows."""
        piece.update.last_answer_at = now
        piece.update.awaited.discard((piece.number, worker))

    def took(self, piece: Piece, worker: Worker, *, in_use: bool) -> list[Effect]:
        update, effects = piece.update, list[Effect]()
        if self.joined_since(worker, piece.number):
            reason = f"it registered while a piece of an update was under way{_CURE}"
            return [Missed(worker, piece.number, reason)]
        if piece.kind == "name":
            return effects
        if not in_use and worker not in update.takers and self._missed(worker) is None:
            reason = "it was not in use, and has not all pieces of the update yet"
            effects.append(Missed(worker, update.began - 1, reason))
        update.takers.setdefault(worker)
        if piece.kind == "weights":
            update.loaded.add(worker)
        return effects

    def failed(self, piece: Piece, worker: Worker, trouble: str, *, is_unchanged: bool) -> list[Effect]:
        """Note that ``worker`` failed ``piece``. ``is_unchanged``: the worker surely kept its weights."""
        missed = self._missed(worker)
        if missed is None and is_unchanged and worker not in piece.update.takers:
            return []
        if missed is not None and missed.number >= piece.number:
            return []
        return [Missed(worker, piece.number, f"{piece.path} failed: {trouble}{_CURE}")]

    def learnt(
        self, piece: Piece, version: str, by: list[Worker], fleet: str | None, now: float, *, is_told: bool
    ) -> list[Effect]:
        """Note that the workers ``by`` report ``version``.

        ``is_told``: ``piece`` surely brought this version. Otherwise the workers may have had it before ``piece``, too.
        """
        update = piece.update
        if update.version is None or update.is_guessed:
            update.version, update.is_guessed = version, not is_told
        elif version != update.version and is_told and update is self.current:
            effects = self.close()
            self.current = Update(piece.number, fleet, now, version, takers=dict.fromkeys(by), loaded=set(by))
            return effects
        return []

    def close(self) -> list[Effect]:
        """End the current update."""
        self._is_first = False
        update = self.current
        if update is None or update.is_closed:
            return []
        update.is_closed = True
        late = {worker for _, worker in update.awaited}
        whole = [worker for worker in update.loaded - late if self._has_all(update, worker)]
        reason = f"it has not answered a piece of an update that is over{_CURE}"
        effects: list[Effect] = [Missed(worker, self._calls, reason) for worker in late]
        if not whole:
            self.current = None  # the same version may be tried again
            return effects
        named = update.version or update.before
        effects += [Completed(worker, named) for worker in whole if self._missed(worker) is not None]
        proof = update.version if update.version != update.before else None
        reason = f"it registered during an update, and has not taken it{_CURE}"
        for worker in self._joined.keys() - update.takers.keys():
            if self.joined_since(worker, update.began):
                effects.append(Unproven(worker, self._calls, reason, proof))
        return effects

    def _lacks(self, update: Update, worker: Worker) -> bool:
        """Return True when ``worker`` may lack a piece of ``update``, but is not noted as having missed one."""
        missed = self._missed(worker)
        if missed is not None and missed.number >= update.began:
            return False
        if self.joined_since(worker, update.began) or worker in update.doubted:
            return True
        return worker in update.takers and self._may_be_restarted(worker, update.takers[worker])

    def _has_all(self, update: Update, worker: Worker) -> bool:
        missed = self._missed(worker)
        if missed is None:
            return True
        if missed.version is not None and (update.is_rest or update.version in (None, missed.version)):
            return False  # this update may be the one that the worker missed
        return missed.number < update.began and not update.is_delta
