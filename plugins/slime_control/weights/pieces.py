"""Carries out the effects of updates that come in pieces: missed calls, versions and holds of workers."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from router_core import Worker
from router_core.router import Router
from slime_control.calls.endpoints import Call
from slime_control.calls.fan_out import Answer
from slime_control.pausing.gate import Gate
from slime_control.weights import unannounced
from slime_control.weights.missed_calls import OWNER, MissedCalls
from slime_control.weights.weight_update import Completed, Effect, Piece, Unproven, Update, Updates

__all__ = ["Pieces"]


class Pieces:
    """Passes events to :class:`Updates`, and carries out the effects that it returns.

    No change of its state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, router: Router, gate: Gate, missed: MissedCalls) -> None:
        self._router = router
        self._gate = gate
        self._missed = missed
        self._watched: set[Update] = set()
        self.updates = Updates(missed.weights_of, unannounced.may_be_restarted)

    def next(self, call: Call, *, changes_gate: bool, to_all: bool) -> int:
        """Return the number of ``call``, which is about to be made.

        Before that, close the current update if ``call`` ends it, or if no piece has come for a long time.
        """
        is_whole = call.path == "/update_weights_from_disk" and to_all
        if changes_gate or call.misses == "memory" or is_whole or self._is_silent(self.updates.current):
            self._carry_out(self.updates.close())
        return self.updates.count()

    def receive(self, piece: Piece, workers: Iterable[Worker]) -> Piece | None:
        """Note that ``piece`` is about to go to ``workers``. Returns None when it belongs to no update."""
        fleet = self._router.weights.current
        is_piece, effects = self.updates.receive(piece, workers, fleet, anyio.current_time())
        self._carry_out(effects)
        return piece if is_piece else None

    def answered(self, piece: Piece, worker: Worker, answer: Answer) -> None:
        self.updates.answered(piece, worker, anyio.current_time())
        if answer.trouble is not None:
            self.failed(piece, worker, answer.trouble, is_unchanged=answer.is_as_before)
            return
        self._carry_out(self.updates.took(piece, worker, in_use=worker.in_use))
        if piece.kind != "name" and not self.updates.joined_since(worker, piece.number):
            piece.update.takers[worker] = unannounced.standing(worker)

    def failed(self, piece: Piece, worker: Worker, trouble: str, *, is_unchanged: bool = False) -> None:
        """Note that ``worker`` failed ``piece``. ``is_unchanged``: the worker surely kept its weights."""
        self._carry_out(self.updates.failed(piece, worker, trouble, is_unchanged=is_unchanged))

    def learnt(self, piece: Piece, version: str, workers: list[Worker], *, is_told: bool) -> None:
        """Note that ``workers``, which took ``piece``, say that their version is ``version`` now.

        The router has read no version from ``piece`` itself. ``is_told``: see :meth:`Updates.learnt`.
        """
        weights, update = self._router.weights, self.updates.current
        if version in weights.ordered:
            return  # not this update's version, since it was seen before: the workers still report their old version
        now = anyio.current_time()
        self._carry_out(self.updates.learnt(piece, version, workers, weights.current, now, is_told=is_told))
        current = self.updates.current
        if current is not None and current is not update:
            for worker in workers:
                current.takers[worker] = unannounced.standing(worker)
                if self._missed.weights_of(worker) is None:
                    self._router.pool.set_version(worker, version)

    def done(self, piece: Piece) -> None:
        """Note that all workers have answered ``piece``."""
        update = piece.update
        if piece.path == "/end_weight_update":
            self._carry_out(self.updates.close())
        elif update not in self._watched and any(OWNER in worker.holds for worker in update.takers):
            self._watched.add(update)
            self._router.tasks.start_soon(self._watch, update)

    async def _watch(self, update: Update) -> None:
        """Close ``update`` when no more pieces come. A worker that missed an earlier call is held until then."""
        while not update.is_closed:
            await anyio.sleep(unannounced.QUIET_S / 60)
            if self._is_silent(update):
                self._carry_out(self.updates.close())
        self._watched.discard(update)

    def _is_silent(self, update: Update | None) -> bool:
        now = anyio.current_time()
        return update is not None and not self._gate.closed and unannounced.is_silent(update, now)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            worker = effect.worker
            if isinstance(effect, Completed):
                self._missed.clear(worker, "weights")
                self._router.pool.set_version(worker, effect.version)
                self._missed.readmit(worker)
            elif not isinstance(effect, Unproven):
                self._missed.add(worker, "weights", effect.number, effect.reason)
            elif self._gate.closed and OWNER not in worker.holds:
                if effect.version is None:
                    self._missed.add(worker, "weights", effect.number, effect.reason)
                elif worker.weight_version != effect.version:
                    self._missed.set_aside(worker, effect.reason)
