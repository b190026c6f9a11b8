"""A control call to the fleet: its outcome, and the effects on workers and weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus

import anyio

from router_core import Reply, Worker
from router_core.errors import NoWorker
from router_core.request import Request
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_control.calls.bodies import begins_update, is_delta, named_version
from slime_control.calls.endpoints import Call
from slime_control.calls.fan_out import Answer, FanOut, passed_on
from slime_control.calls.recipients import Recipients
from slime_control.pausing.gate import Gate
from slime_control.pausing.under_way import UnderWay
from slime_control.weights.missed_calls import MissedCalls
from slime_control.weights.pieces import Pieces
from slime_control.weights.unannounced import learn_version
from slime_control.weights.weight_update import Piece, has_joined

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

Answers = dict[Worker, Answer]

#: Calls after which an engine does not serve, each with the kind (``Call.misses``) of the call that ends this state.
_SUSPENDS = {"/pause_generation": "continue", "/release_memory_occupation": "memory"}


class Fleet:
    """Makes control calls to workers, held workers included: without an update's weights they could never return."""

    def __init__(self, router: Router, fan_out: FanOut, gate: Gate, under_way: UnderWay) -> None:
        self._router = router
        self._fan_out = fan_out
        self._gate = gate
        self._recipients = Recipients(router.pool, fan_out, under_way)
        self._moved_by = 0  # the number of the call that moved the fleet last
        self._moved_to: str | None = None  # the fleet's version, set before plugins are told
        self._missed = MissedCalls(router)
        self._pieces = Pieces(router, gate, self._missed)
        self._suspended: dict[Worker, set[str]] = {}

    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        """Forget the missed calls of a worker that registers or leaves. Pass any change to the current update."""
        if change in ("added", "removed"):
            self._missed.forget(worker)
            self._suspended.pop(worker, None)
        self._pieces.changed(worker, change)

    def weights_confirmed(self, worker: Worker) -> None:
        """See :meth:`MissedCalls.weights_confirmed`."""
        self._missed.weights_confirmed(worker)

    async def call(self, call: Call, request: Request) -> Reply:
        """Make ``call`` and answer it. Raises HTTPError."""
        pauses, continues = call.path == "/pause_generation", call.path == "/continue_generation"
        if not len(self._router.pool):
            if continues:
                self._gate.open()  # workers that register later were never paused
            raise NoWorker("no worker is registered")
        if call.moves_weights:
            self._router.weights.expect_one_kind()
        headers = passed_on(request.headers)
        bodies = await self._recipients.bodies(call, request)
        to_all = len(bodies) == len(self._router.pool)
        version = named_version(request) if call.names_version else None
        changes_gate = (pauses and not self._gate.closed) or (continues and self._gate.closed)
        number = self._pieces.next(call, changes_gate=changes_gate, to_all=to_all)
        piece, kind = None, "begin" if begins_update(request) else call.piece
        if kind is not None:
            sent = Piece(number, call.path, kind, version, is_delta(request))
            piece = self._pieces.sent(sent, bodies)
        unlike = self._unlike_the_fleet(bodies, version)
        answers: Answers = {}

        def on_answer(worker: Worker, answer: Answer) -> None:
            answers[worker] = answer
            if answer.trouble is not None:
                logger.warning("%s: worker %s: %s", call.path, worker.url, answer.trouble)
            elif continues:
                self._gate.open()  # a worker that hangs must not delay the others' requests
            elif version is not None and (piece is None or self._missed.weights_of(worker) is None):
                self._router.pool.set_version(worker, version)
            if piece is not None:
                self._pieces.answered(piece, worker, answer.trouble, is_unchanged=answer.is_as_before)

        began = anyio.current_time()
        closed = self._gate.close() if pauses else None
        await self._fan_out.send(call, request.method, request.target, headers, bodies, on_answer)
        if pauses and closed is not None and not _succeeded(answers):
            self._gate.undo(closed)
        note = ""
        if call.names_version and version is None:
            version, is_told = await learn_version(self._router.pool, self._fan_out, answers)
            if version is None and _succeeded(answers):
                note = "; the workers report different versions, so the fleet's version has not moved"
            elif version is not None and piece is not None:
                took = [worker for worker, answer in answers.items() if answer.trouble is None]
                self._pieces.learnt(piece, version, took, is_told=is_told)
        caught_up = self._compare(call, answers, number, piece, to_all=to_all)
        if kind == "name" and piece is None:
            self._set_renamed_aside(unlike, answers, number)
        try:
            if version is not None and _succeeded(answers):
                if number < self._moved_by:
                    self._set_overtaken_aside(answers, version)
                else:
                    if to_all:
                        self._set_newcomers_aside(bodies, version, number)
                    await self._move(version, call.path, number)
        finally:
            if piece is not None:
                self._pieces.done(piece)
            for worker in caught_up:
                self._missed.readmit(worker)
        if call.path != "/abort_request":  # a client may send many aborts
            took_s = anyio.current_time() - began
            logger.info(
                "%s: %d of %d workers succeeded in %.1f s",
                call.path,
                _succeeded(answers),
                len(answers),
                took_s,
            )
        return _reply(call, answers, note)

    def _compare(
        self, call: Call, answers: Answers, number: int, piece: Piece | None, *, to_all: bool
    ) -> list[Worker]:
        """Note which workers took ``call`` and which missed it. Returns the workers that may be readmitted.

        If all workers failed, they are still consistent, and nothing is noted here. The exception is a call about
        weights that went to only some of the fleet's workers. Then an update counts as missed unless the worker surely
        kept its weights, and a ``/pull_weights`` always counts as missed. :meth:`Pieces.answered` has noted a failed
        piece of an update when the answer came. But a worker that took the piece may have failed since, because it
        reported no version (see :func:`learn_version`); that failure is noted here.
        """
        caught_up: list[Worker] = []
        is_update = call.is_update
        is_weights = is_update or call.prepares
        all_failed = not _succeeded(answers)
        for worker, answer in answers.items() if call.misses is not None else ():
            if worker not in self._router.pool:
                continue
            if answer.trouble is None:
                if self._took(call, worker, number):
                    caught_up.append(worker)
            elif all_failed and ((is_update and answer.is_as_before) or to_all or not is_weights):
                continue
            elif piece is not None:
                self._pieces.answered(piece, worker, answer.trouble)
            else:
                self._set_aside(call, worker, number, answer)
            if is_update and (answer.trouble is not None or self._missed.weights_of(worker) is not None):
                self._router.pool.set_version(worker, None)  # its weights may be old, new, or a mix
        return caught_up

    def _took(self, call: Call, worker: Worker, number: int) -> bool:
        """Clear the missed calls that ``call`` makes up for. Returns True when ``worker`` may be readmitted."""
        if call.path in _SUSPENDS:
            self._suspended.setdefault(worker, set()).add(_SUSPENDS[call.path])
        else:
            self._suspended.get(worker, set()).discard(call.misses)
        missed, has_weights = self._missed.of(worker), "weights" in call.clears
        if has_weights and "pull" in missed:
            self._router.pool.set_version(worker, None)  # it has loaded the files of an earlier pull
            return False
        cleared = [kind for kind in call.clears if kind in missed and missed[kind].number < number]
        for kind in cleared:
            self._missed.clear(worker, kind)
        if has_weights:
            self._pieces.changed(worker, "cured", number)
        return has_weights or bool(cleared)

    def _set_aside(self, call: Call, worker: Worker, number: int, answer: Answer) -> None:
        """Hold ``worker`` if needed: it failed ``call``, and other workers may have taken the call.

        ``call`` is no piece of an update.
        """
        assert call.misses is not None  # narrowing
        reason = f"{call.path} failed: {answer.trouble}"
        is_update = call.is_update
        is_weights = is_update or call.prepares
        was_suspended = call.misses in self._suspended.get(worker, ())
        if call.prepares:  # even if the call did not reach the worker
            self._missed.add(worker, "weights", number, reason)
            self._missed.add(worker, call.misses, number, reason)
        elif not is_weights and worker.state == "joining" and not was_suspended:
            return  # a starting engine is neither paused nor without memory, so it has missed nothing
        elif answer.reached and not (is_update and answer.is_as_before):
            known = None if is_weights else self._missed.reason(worker)
            self._missed.add(worker, call.misses, number, known or reason)
        elif is_weights or worker.state == "ready":
            self._missed.set_aside(worker, reason)

    def _unlike_the_fleet(self, workers: Iterable[Worker], version: str | None) -> list[Worker]:
        """Return the workers that are not in use, or whose known version is neither the fleet's nor ``version``."""
        known = (None, version, self._router.weights.current)
        return [worker for worker in workers if not worker.in_use or worker.weight_version not in known]

    def _set_renamed_aside(self, unlike: Iterable[Worker], answers: Answers, number: int) -> None:
        """Hold those of ``unlike`` that took the new version name: the versions that they report prove nothing."""
        for worker in unlike:
            if answers[worker].trouble is None and self._missed.weights_of(worker) is None:
                reason = "it had other weights than the fleet when their version was renamed"
                self._missed.add(worker, "weights", number, reason)

    def _set_overtaken_aside(self, answers: Answers, version: str) -> None:
        """Hold the workers that took ``version`` after the fleet had moved to a later version."""
        if version in (self._moved_to, self._router.weights.current):
            return
        for worker in answers:
            if worker.state == "ready" and worker.weight_version == version:
                self._missed.set_aside(
                    worker, f"it took {version!r} after the fleet had moved to {self._moved_to!r}"
                )

    def _set_newcomers_aside(self, told: Mapping[Worker, bytes], version: str, number: int) -> None:
        """Hold the workers without ``version`` that registered, for the first time or again, during call ``number``.

        The call went to all workers that were registered at its beginning; they are the keys of ``told``.
        """
        for worker in self._router.pool:
            is_new = worker not in told or has_joined(self._pieces.state, worker, number)
            if is_new and worker.weight_version != version:
                self._missed.set_aside(worker, f"it registered while the weights moved to {version!r}")

    async def _move(self, version: str, source: str, number: int) -> None:
        """Move the fleet to ``version`` if every worker in use has it."""
        in_use = [worker for worker in self._router.pool if worker.in_use]
        if all(worker.weight_version == version for worker in in_use):
            self._moved_by, self._moved_to = number, version
            await self._router.announce_weights(version, source)


def _succeeded(answers: Answers) -> int:
    return sum(answer.trouble is None for answer in answers.values())


def _reply(call: Call, answers: Answers, note: str) -> Reply:
    succeeded, total = _succeeded(answers), len(answers)
    message = f"{call.path}: {succeeded} of {total} workers succeeded{note}"
    for worker, answer in answers.items():
        if answer.trouble is not None:
            message += f"; {worker.url}: {answer.trouble}"
    workers = {worker.url: answer.as_dict() for worker, answer in answers.items()}
    content = {"success": succeeded == total, "message": message, "workers": workers}
    return Reply.from_json(content, _status(answers, succeeded))


def _status(answers: Answers, succeeded: int) -> int:
    if succeeded == len(answers):
        return HTTPStatus.OK
    if succeeded:
        return HTTPStatus.MULTI_STATUS
    # If all workers failed with the same 4xx or with 504, answer with that status, which says more than a 502.
    statuses = {answer.status for answer in answers.values()}
    common = statuses.pop() if len(statuses) == 1 else None
    refused = common is not None and (400 <= common < 500 or common == HTTPStatus.GATEWAY_TIMEOUT)
    return common if common is not None and refused else HTTPStatus.BAD_GATEWAY
