"""Runs the state machine of updates that come in pieces, and carries out its effects on workers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import anyio

from router_core import Worker
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_control.calls.endpoints import Call
from slime_control.pausing.gate import Gate
from slime_control.weights import unannounced, weight_update
from slime_control.weights.missed_calls import OWNER, MissedCall, MissedCalls
from slime_control.weights.unannounced import Standing
from slime_control.weights.weight_update import Collecting, Completed, Idle, Piece, State, Step, Unproven

__all__ = ["Pieces"]


class Pieces:
    """Keeps the state of :mod:`~slime_control.weights.weight_update`, and carries out the effects of its events.

    No change of the state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, router: Router, gate: Gate, missed: MissedCalls) -> None:
        self.state: State = Idle(is_first=True)
        self._router = router
        self._gate = gate
        self._missed = missed
        self._calls = 0
        self._heard_at = 0.0
        self._standings: dict[Worker, Standing] = {}  # of each worker, after the last piece that it took
        self._watched: set[int] = set()  # updates that _watch closes, as the numbers of their first pieces

    def next(self, call: Call, *, changes_gate: bool, to_all: bool) -> int:
        """Return the number of ``call``, which is about to be made.

        Before that, close the current update if ``call`` ends it, or if no piece has come for a long time.
        """
        is_whole = call.path == "/update_weights_from_disk" and to_all
        if changes_gate or call.misses == "memory" or is_whole or self._is_silent():
            self._close()
        self._calls += 1
        return self._calls

    def sent(self, piece: Piece, to: Collection[Worker]) -> Piece | None:
        """Note that ``piece`` is about to go to the workers ``to``. Returns ``piece``, or None if no update has it."""
        self._heard_at = anyio.current_time()
        restarted = [each for each in to if unannounced.may_be_restarted(each, self._standings.get(each))]
        fleet, missed = self._router.weights.current, self._all_missed(to)
        self._carry_out(weight_update.sent(self.state, piece, to, restarted, fleet, missed))
        if not isinstance(self.state, Collecting):
            return None
        if self.state.update.began == piece.number:
            self._standings.clear()
        return piece

    def answered(
        self, piece: Piece, worker: Worker, trouble: str | None, *, is_unchanged: bool = False
    ) -> None:
        """Note an answer, see :func:`weight_update.answered`."""
        self._heard_at = anyio.current_time()
        missed, in_use = self._missed.weights_of(worker), worker.in_use
        step = weight_update.answered(
            self.state, piece, worker, trouble, missed, in_use=in_use, is_unchanged=is_unchanged
        )
        self._carry_out(step)
        update = self.state.update
        if trouble is None and piece.kind != "name" and update is not None and piece.number >= update.began:
            self._standings[worker] = unannounced.standing(worker)

    def learnt(self, piece: Piece, version: str, by: Collection[Worker], *, is_told: bool) -> None:
        """Note a version that the router has not read from ``piece`` itself, see :func:`weight_update.learnt`."""
        weights = self._router.weights
        if version in weights.ordered:
            return  # not this update's version, since it was seen before: the workers still report their old version
        self._heard_at = anyio.current_time()
        step = weight_update.learnt(
            self.state, piece, version, by, weights.current, self._calls, self._all_missed(), is_told=is_told
        )
        self._carry_out(step)
        for effect in step[1]:
            worker = effect.worker
            if isinstance(effect, Completed) and worker in by:  # it has weights of the next update, too
                self._router.pool.set_version(worker, version)
                self._standings[worker] = unannounced.standing(worker)

    def changed(self, worker: Worker, change: WorkerChange | Literal["cured"], number: int = 0) -> None:
        """Note a change of ``worker``, see :func:`weight_update.changed`. ``number`` 0 means that of the last call."""
        self._carry_out(weight_update.changed(self.state, worker, change, number or self._calls))

    def done(self, piece: Piece) -> None:
        """Note that all workers have answered ``piece``."""
        if piece.path == "/end_weight_update":
            self._close()
        if not isinstance(self.state, Collecting) or self.state.update.began in self._watched:
            return
        update = self.state.update
        if any(OWNER in worker.holds for worker in update.takers):
            self._watched.add(update.began)
            self._router.tasks.start_soon(self._watch, update.began)

    async def _watch(self, began: int) -> None:
        """Close the update when no more pieces come. A worker that missed an earlier call is held until then."""
        while isinstance(self.state, Collecting) and self.state.update.began == began:
            await anyio.sleep(unannounced.QUIET_S / 60)
            if self._is_silent():
                self._close()
        self._watched.discard(began)

    def _is_silent(self) -> bool:
        return not self._gate.closed and unannounced.is_silent(self.state.update, self._heard_at)

    def _close(self) -> None:
        self._carry_out(weight_update.close(self.state, self._calls, self._all_missed()))

    def _all_missed(self, to: Collection[Worker] = ()) -> dict[Worker, MissedCall]:
        """Return the last missed call about weights of each of ``to``, and of each worker that took a piece."""
        takers = () if self.state.update is None else self.state.update.takers
        found = {worker: self._missed.weights_of(worker) for worker in (*to, *takers)}
        return {worker: missed for worker, missed in found.items() if missed is not None}

    def _carry_out(self, step: Step) -> None:
        self.state, effects = step
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
