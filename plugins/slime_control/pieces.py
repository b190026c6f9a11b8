"""Updates of the weights that come in pieces: where one begins and ends, and which workers have all of it.

Trainers name the version with each piece (slime), with one of them, or by ``/update_weight_version`` behind them
(miles); most pause generation around all of them, and newer engines are told begin and end. Nothing says which piece
is the last one. So an update

- begins with a ``/begin_weight_update``, or a ``/post_process_weights`` that restores; with a piece that names another
  version; with one that names none after the end of the former;
- ends when the next one begins, when generation is paused or continues, when memory is released or resumed, with an
  ``/end_weight_update``, and when no piece has come for a minute while generation was not paused.

Pieces that name the same version are one update, whatever is between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import anyio

from router_core import Worker
from router_core.router import Router
from slime_control.calls import Call
from slime_control.fan_out import Answer
from slime_control.gate import Gate
from slime_control.missed_calls import OWNER, MissedCalls

__all__ = ["Pieces", "Update"]

#: Of silence, after which an update is over that nothing else ends.
_QUIET_S = 60.0
#: They belong to the pieces before them.
_LAST = ("/update_weight_version", "/end_weight_update", "/post_process_weights")
_CURE = "it comes back with all pieces of another update, or with one from disk"


@dataclass(eq=False, slots=True)
class Update:
    """Pieces that belong together. ``began``: the number of the call that was the first; ``before``: what the fleet
    had then. ``is_rest``: it may have begun before this process did. ``is_guessed``: ``version`` is what some say who
    may have begun with it; the first that is named counts. ``is_delta``: they change weights that are there, and so
    make good for none that are not.
    """

    began: int
    before: str | None
    version: str | None = None
    is_rest: bool = False
    is_guessed: bool = False
    is_delta: bool = False
    is_over: bool = False
    is_watched: bool = False
    ended_at: float = 0.0  # the last piece so far
    #: Who took a piece, and what was known of it after the last one.
    takers: dict[Worker, tuple[str, str | None]] = field(default_factory=dict)
    #: Those of them that took weights, and were not only told that some come.
    loaded: set[Worker] = field(default_factory=set)
    #: Those of them that were quarantined since.
    doubted: set[Worker] = field(default_factory=set)
    #: How many pieces are with them that they have not answered.
    awaited: Counter[Worker] = field(default_factory=Counter)

    def has(self, version: str | None) -> bool:
        """Whether a piece that names ``version`` belongs to it."""
        if version is None or self.version is None or self.is_guessed:
            return not self.is_over
        return version == self.version


class Pieces:
    """Changed only by functions without ``await``: one event loop needs no lock. Calls are numbered as they come."""

    def __init__(self, router: Router, gate: Gate, missed: MissedCalls) -> None:
        self._router = router
        self._gate = gate
        self._missed = missed
        self._calls = 0
        self._is_new = True  # nothing was seen yet that stands between two updates
        self._current: Update | None = None
        #: During or after which call they registered.
        self._joined: dict[Worker, int] = {}

    def registered(self, worker: Worker) -> None:
        """``worker`` may be another process than before."""
        self.left(worker)
        self._joined[worker] = self._calls

    def left(self, worker: Worker) -> None:
        """``worker`` was removed."""
        self._joined.pop(worker, None)
        if self._current is not None:
            self._current.takers.pop(worker, None)
            self._current.loaded.discard(worker)
            self._current.doubted.discard(worker)

    def doubted(self, worker: Worker) -> None:
        """``worker`` was quarantined."""
        if self._current is not None and worker in self._current.takers:
            self._current.doubted.add(worker)

    def joined_since(self, worker: Worker, number: int) -> bool:
        """Whether ``worker`` registered during that call or later."""
        return self._joined.get(worker, 0) >= number

    def next(self, call: Call, *, changes_gate: bool, to_all: bool) -> int:
        """``call`` is about to be made: its number. Ends the update that it ends."""
        is_quiet = self._current is not None and self._is_quiet(self._current)
        is_whole = call.path == "/update_weights_from_disk" and to_all
        if changes_gate or call.misses == "memory" or is_whole or is_quiet:
            self._end()
            self._is_new = False
        self._calls += 1
        return self._calls

    def of(
        self,
        call: Call,
        number: int,
        version: str | None,
        workers: Iterable[Worker],
        *,
        begins: bool,
        is_delta: bool,
    ) -> Update | None:
        """The update that ``call`` belongs to, which names ``version`` and goes to ``workers``; None: to none.

        ``begins``: it says that it is the first of one.
        """
        current = self._current
        if not call.partial and call.path != "/update_weight_version":
            return None
        if begins or (call.path not in _LAST and (current is None or not current.has(version))):
            self._end()
            self._is_new &= not begins
            current = self._begin(number)
        elif current is None or (current.is_over and not call.partial):
            return None
        if version is not None:
            current.version, current.is_guessed = version, False
        current.is_delta |= is_delta
        current.is_over = False  # one that was paused around each piece
        for worker in workers:
            current.awaited[worker] += 1
            if self._lacks(current, worker):
                self._miss(worker, number - 1, "it was not there for all pieces of an update")
        return current

    def answered(self, update: Update, call: Call, number: int, worker: Worker, answer: Answer) -> None:
        """``worker`` has answered ``call``, a piece of ``update``."""
        update.ended_at = anyio.current_time()
        update.awaited -= Counter((worker,))
        if answer.trouble is not None:
            # All pieces alone mend one that missed weights, even if the others refused this piece too.
            has_missed = self._missed.weights_of(worker) is not None
            if has_missed or worker in update.takers or not answer.is_as_before:
                self.failed(call, number, worker, answer)
        elif self.joined_since(worker, number):
            self._miss(worker, number, "it registered while a piece of an update was under way")
        elif call.partial:
            if not worker.in_use and worker not in update.takers and self._missed.weights_of(worker) is None:
                reason = "it was not in use, and has not all pieces of the update yet"
                self._missed.add(worker, "weights", update.began - 1, reason)
            update.takers[worker] = _standing(worker)
            if call.names_version:
                update.loaded.add(worker)

    def failed(self, call: Call, number: int, worker: Worker, answer: Answer) -> None:
        """``worker`` may have some of ``call``, a piece, or others have it and it has not."""
        missed = self._missed.weights_of(worker)
        if missed is None or missed.number < number:
            self._miss(worker, number, f"{call.path} failed: {answer.trouble}")

    def _miss(self, worker: Worker, number: int, reason: str) -> None:
        """``worker`` has not all that came until the call of that ``number``."""
        self._missed.add(worker, "weights", number, f"{reason}; {_CURE}")

    def learnt(
        self, update: Update, number: int, version: str, workers: Iterable[Worker], *, is_told: bool
    ) -> None:
        """``workers`` took a piece of ``update`` that named no version which was read, and say ``version`` now.

        ``is_told``: that piece has told them, surely. If not, it may be what they began with.
        """
        if version in self._router.weights.ordered:
            return  # some engine began with it, perhaps meanwhile: no name of an update
        if update.version is None or update.is_guessed:
            update.version, update.is_guessed = version, not is_told
        elif version != update.version and is_told and update is self._current:
            self._end()
            update = self._begin(number)
            update.version = version
            for worker in workers:
                update.takers[worker] = _standing(worker)
                update.loaded.add(worker)
                if self._missed.weights_of(worker) is None:
                    worker.weight_version = version

    def done(self, update: Update, call: Call) -> None:
        """All have answered ``call``, a piece of ``update``."""
        if call.path == "/end_weight_update":
            self._end()
        elif not update.is_watched and any(OWNER in worker.holds for worker in update.takers):
            update.is_watched = True
            self._router.tasks.start_soon(self._watch, update)

    def has_all(self, worker: Worker, number: int) -> None:
        """``worker`` got whole weights in another way, by the call of that ``number``: it has missed nothing."""
        if not self.joined_since(worker, number):
            self._joined.pop(worker, None)

    def _begin(self, number: int) -> Update:
        self._current = Update(
            number, self._router.weights.current, is_rest=self._is_new, ended_at=anyio.current_time()
        )
        self._is_new = False
        return self._current

    def _lacks(self, update: Update, worker: Worker) -> bool:
        """Whether the process that is ``worker`` now may have missed a piece of ``update`` that nobody saw fail."""
        missed = self._missed.weights_of(worker)
        if missed is not None and missed.number >= update.began:
            return False  # that is known
        if self.joined_since(worker, update.began) or worker in update.doubted:
            return True
        # One that is not in use, and was looked at meanwhile, may have been started anew.
        if worker not in update.takers or worker.in_use:
            return False
        return worker.state == "quarantined" or update.takers[worker] != _standing(worker)

    def _end(self) -> None:
        """The current update is over: who has all of it has made good for what it missed before."""
        update = self._current
        if update is None or update.is_over:
            return
        update.is_over = True
        for worker in update.awaited:
            self._miss(worker, self._calls, "it has not answered a piece of an update that is over")
        whole = [worker for worker in update.loaded if self._is_whole(update, worker)]
        for worker in whole:
            if self._missed.weights_of(worker) is not None:
                self._missed.clear(worker, "weights")
                worker.weight_version = update.version or update.before
                self._missed.readmit(worker)
        if not whole:
            self._current = None  # it failed everywhere: the same version may be tried again
        elif self._gate.closed:
            self._set_newcomers_aside(update)

    def _is_whole(self, update: Update, worker: Worker) -> bool:
        missed = self._missed.weights_of(worker)
        if missed is None:
            return True
        is_old = missed.version is not None
        if is_old and (update.is_rest or update.version in (None, missed.version)):
            return False
        return missed.number < update.began and not update.is_delta

    def _set_newcomers_aside(self, update: Update) -> None:
        """Those that registered after the last piece, before the end, and have what they began with."""
        is_told = update.version not in (None, update.before)  # else versions are no proof
        for worker in self._router.pool:
            if (
                self.joined_since(worker, update.began)
                and worker not in update.takers
                and OWNER not in worker.holds
            ):
                reason = "it registered during an update, and has not taken it"
                if not is_told:
                    self._miss(worker, self._calls, reason)
                elif worker.weight_version != update.version:
                    self._missed.set_aside(worker, f"{reason}; {_CURE}")

    async def _watch(self, update: Update) -> None:
        """Somebody waits for the end of ``update``."""
        while not update.is_over:
            await anyio.sleep(max(_QUIET_S - self._silence_s(update), _QUIET_S / 60))
            if self._is_quiet(update):
                self._end()
        update.is_watched = False

    def _is_quiet(self, update: Update) -> bool:
        """Whether no piece of ``update`` has come for so long that none will, with nobody paused for it."""
        return self._silence_s(update) > _QUIET_S and not update.awaited and not self._gate.closed

    def _silence_s(self, update: Update) -> float:
        return anyio.current_time() - update.ended_at


def _standing(worker: Worker) -> tuple[str, str | None]:
    return worker.state, worker.reason
