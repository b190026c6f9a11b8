"""A control call to the fleet: what came of it, and what that means for workers and weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus

import anyio

from router_core import Reply, Worker
from router_core.errors import NoWorker
from router_core.request import Request
from router_core.router import Router
from router_core.weights import version_named
from slime_control.bodies import begins_update, is_delta, named_version
from slime_control.calls import Call
from slime_control.fan_out import Answer, FanOut, passed_on
from slime_control.gate import Gate
from slime_control.missed_calls import OWNER, MissedCalls
from slime_control.pieces import Pieces, Update
from slime_control.recipients import Recipients
from slime_control.under_way import UnderWay

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

Answers = dict[Worker, Answer]

#: Calls after which an engine does not serve, and the call that one misses when it does not go on.
_SUSPENDS = {"/pause_generation": "continue", "/release_memory_occupation": "memory"}


class Fleet:
    """All registered workers, also those that get no requests now: whoever may come back must have the weights."""

    def __init__(self, router: Router, fan_out: FanOut, gate: Gate, under_way: UnderWay) -> None:
        self._router = router
        self._fan_out = fan_out
        self._gate = gate
        self._recipients = Recipients(router.pool, fan_out, under_way)
        self._moved_by = 0
        self._moved_to: str | None = None  # the fleet's version, or about to be while plugins are told
        self._missed = MissedCalls(router)
        self._pieces = Pieces(router, gate, self._missed)
        self._suspended: dict[Worker, set[str]] = {}

    def registered(self, worker: Worker) -> None:
        """``worker`` begins afresh: what it failed before is forgotten."""
        self._missed.forget(worker)
        self._suspended.pop(worker, None)
        self._pieces.registered(worker)

    def doubted(self, worker: Worker) -> None:
        """``worker`` was quarantined: when it comes back it may have been started anew."""
        self._pieces.doubted(worker)

    def left(self, worker: Worker) -> None:
        """``worker`` was removed."""
        self._missed.forget(worker)
        self._suspended.pop(worker, None)
        self._pieces.left(worker)

    async def call(self, call: Call, request: Request) -> Reply:
        """Make ``call`` and answer it. Raises HTTPError."""
        pauses, continues = call.path == "/pause_generation", call.path == "/continue_generation"
        if not len(self._router.pool):
            if continues:
                self._gate.open()  # for those who register next, and have never paused
            raise NoWorker("no worker is registered")
        if call.moves_weights:
            self._router.weights.expect_one_kind()
        headers = passed_on(request.headers)
        bodies = await self._recipients.bodies(call, request)
        everybody = len(bodies) == len(self._router.pool)
        version = named_version(request) if call.names_version else None
        changes_gate = (pauses and not self._gate.closed) or (continues and self._gate.closed)
        number = self._pieces.next(call, changes_gate=changes_gate, to_all=everybody)
        update = None
        if call.aside == "weights":
            update = self._pieces.of(
                call, number, version, bodies, begins=begins_update(request), is_delta=is_delta(request)
            )
        unlike = self._unlike_the_fleet(bodies, version)
        answers: Answers = {}

        def on_answer(worker: Worker, answer: Answer) -> None:
            answers[worker] = answer
            if answer.trouble is not None:
                logger.warning("%s: worker %s: %s", call.path, worker.url, answer.trouble)
            elif continues:
                self._gate.open()  # one that hangs must not hold up what the others can do
            elif version is not None and (update is None or self._missed.weights_of(worker) is None):
                worker.weight_version = version
            if update is not None:
                self._pieces.answered(update, call, number, worker, answer)

        closed = self._gate.close() if pauses else None
        await self._fan_out.send(call, request.method, request.target, headers, bodies, on_answer)
        if pauses and closed is not None and not _succeeded(answers):
            self._gate.undo(closed)
        note = ""
        if call.names_version and version is None:
            version, is_told = await self._learn_version(answers)
            if version is None and _succeeded(answers):
                note = "; the workers do not name one version, so the fleet's has not moved"
            elif version is not None and update is not None:
                took = [worker for worker, answer in answers.items() if answer.trouble is None]
                self._pieces.learnt(update, number, version, took, is_told=is_told)
        caught_up = self._set_aside(call, answers, number, update, everybody=everybody)
        if call.path == "/update_weight_version" and update is None:
            self._set_renamed_aside(unlike, answers, number)
        try:
            if version is not None and _succeeded(answers):
                if number < self._moved_by:
                    self._set_overtaken_aside(answers, version)
                else:
                    if everybody:
                        self._set_newcomers_aside(bodies, version, number)
                    await self._move(version, call.path, number)
        finally:
            if update is not None:
                self._pieces.done(update, call)
            for worker in caught_up:
                self._missed.readmit(worker)
        return _reply(call, answers, note)

    async def _learn_version(self, answers: Answers) -> tuple[str | None, bool]:
        """The version that all workers which took the update say they have; None when they do not agree.

        And whether the update has told them so: one that is in use had another before. One that does not say counts
        as failed from now on.
        """
        said: set[str] = set()
        is_told = False

        async def ask(worker: Worker) -> None:
            nonlocal is_told
            about = await self._fan_out.question(worker, b"/model_info", b"/get_model_info")
            version = version_named(about.get("weight_version"))
            if version is not None:
                is_told |= worker.in_use and worker.weight_version not in (None, version)
                worker.weight_version = version
                said.add(version)
            else:
                trouble = "it took the update, but does not say which weights it has"
                answers[worker] = replace(answers[worker], trouble=trouble)

        async with anyio.create_task_group() as tasks:
            for worker, answer in list(answers.items()):
                if answer.trouble is None:
                    tasks.start_soon(ask, worker)
        return (said.pop(), is_told) if len(said) == 1 else (None, False)

    def _set_aside(
        self, call: Call, answers: Answers, number: int, update: Update | None, *, everybody: bool
    ) -> list[Worker]:
        """Keep new requests from the workers that are not where the others are now; those that failed missed ``call``.

        One that does: whatever it says about itself is no proof until it does such a call later, or is registered
        again. One that did nothing is as it was, unless the others have got a piece of an update. Returns those that
        have made good for what they failed.
        """
        caught_up: list[Worker] = []
        if call.misses is None:
            return caught_up
        is_update = call.aside == "weights"
        # When all fail they are as one another, but for the pieces of an update, which some of them may have; an update
        # that was for some leaves those behind that fail it.
        nobody_did = not _succeeded(answers)
        is_weights = is_update or call.prepares
        for worker, answer in answers.items():
            if worker not in self._router.pool:
                continue
            missed = self._missed.of(worker)
            if answer.trouble is None:
                self._note_taken(worker, call)
                if "weights" in call.clears and "pull" in missed:
                    worker.weight_version = None  # it has loaded what it had pulled before
                    continue
                for kind in call.clears & missed.keys():
                    if missed[kind].number < number:  # else it was made earlier, and ended late
                        self._missed.clear(worker, kind)
                        caught_up.append(worker)
                if "weights" in call.clears:
                    self._pieces.has_all(worker, number)
                    caught_up.append(worker)  # also one that missed nothing
            elif nobody_did and ((is_update and answer.is_as_before) or everybody or not is_weights):
                continue
            elif update is not None:
                self._pieces.failed(call, number, worker, answer)
            else:
                reason = f"{call.path} failed: {answer.trouble}"
                if call.prepares:  # reached or not
                    self._missed.add(worker, "weights", number, reason)
                    self._missed.add(worker, call.misses, number, reason)
                elif not is_weights and worker.state == "joining" and call.misses not in self._taken(worker):
                    continue  # it begins as others that register now
                elif answer.reached and not (is_update and answer.is_as_before):
                    known = None if is_weights else worker.holds.get(OWNER) or worker.holds.get("weights")
                    self._missed.add(worker, call.misses, number, reason if known is None else known.reason)
                elif is_weights or worker.state == "ready":
                    self._missed.set_aside(worker, reason)
            if is_update and (answer.trouble is not None or self._missed.weights_of(worker) is not None):
                worker.weight_version = None  # it may have the old ones, the new ones, or some of each
        return caught_up

    def _taken(self, worker: Worker) -> Collection[str]:
        """What ``worker`` has to do to serve again, since it has done the call before that."""
        return self._suspended.get(worker, ())

    def _note_taken(self, worker: Worker, call: Call) -> None:
        if call.path in _SUSPENDS:
            self._suspended.setdefault(worker, set()).add(_SUSPENDS[call.path])
        elif call.misses is not None:
            self._suspended.get(worker, set()).discard(call.misses)

    def _unlike_the_fleet(self, workers: Iterable[Worker], version: str | None) -> list[Worker]:
        """Those that have, or may have, weights that are neither the fleet's nor ``version``."""
        known = (None, version, self._router.weights.current)
        return [worker for worker in workers if not worker.in_use or worker.weight_version not in known]

    def _set_renamed_aside(self, unlike: Iterable[Worker], answers: Answers, number: int) -> None:
        """Those that bear the fleet's new name, and had other weights before: what they say is no proof any more."""
        for worker in unlike:
            if answers[worker].trouble is None and self._missed.weights_of(worker) is None:
                reason = "it had other weights than the fleet when they were renamed"
                self._missed.add(worker, "weights", number, reason)

    def _set_overtaken_aside(self, answers: Answers, version: str) -> None:
        """Those that took ``version`` after the later one that the fleet has."""
        if version in (self._moved_to, self._router.weights.current):
            return
        for worker in answers:
            if worker.state == "ready" and worker.weight_version == version:
                self._missed.set_aside(
                    worker, f"it took {version!r} after the fleet had moved to {self._moved_to!r}"
                )

    def _set_newcomers_aside(self, told: Mapping[Worker, bytes], version: str, number: int) -> None:
        """Those that registered, or did so again, while an update for all was under way."""
        for worker in self._router.pool:
            is_new = worker not in told or self._pieces.joined_since(worker, number)
            if is_new and worker.weight_version != version:
                self._missed.set_aside(worker, f"it registered while the weights moved to {version!r}")

    async def _move(self, version: str, source: str, number: int) -> None:
        """The fleet has ``version`` as soon as every worker has that gets requests."""
        in_use = [worker for worker in self._router.pool if worker.in_use]
        if all(worker.weight_version == version for worker in in_use):
            self._moved_by, self._moved_to = number, version
            await self._router.announce_weights(version, source)


def _succeeded(answers: Answers) -> int:
    return sum(answer.trouble is None for answer in answers.values())


def _reply(call: Call, answers: Answers, note: str) -> Reply:
    succeeded, all_of = _succeeded(answers), len(answers)
    message = f"{call.path}: {succeeded} of {all_of} workers succeeded{note}"
    for worker, answer in answers.items():
        if answer.trouble is not None:
            message += f"; {worker.url}: {answer.trouble}"
    workers = {worker.url: answer.as_dict() for worker, answer in answers.items()}
    content = {"success": succeeded == all_of, "message": message, "workers": workers}
    return Reply.from_json(content, _status(answers, succeeded))


def _status(answers: Answers, succeeded: int) -> int:
    if succeeded == len(answers):
        return HTTPStatus.OK
    if succeeded:
        return HTTPStatus.MULTI_STATUS
    # When all refuse for the same reason it is the caller's; slime's client would repeat a 502 sixty times as well.
    statuses = {answer.status for answer in answers.values()}
    common = statuses.pop() if len(statuses) == 1 else None
    refused = common is not None and (400 <= common < 500 or common == HTTPStatus.GATEWAY_TIMEOUT)
    return common if common is not None and refused else HTTPStatus.BAD_GATEWAY
