"""Guesses about trainers that do not announce the end of an update, its version, or the restart of an engine."""

from __future__ import annotations

from dataclasses import replace

import anyio

from router_core import Worker
from router_core.pool import WorkerPool
from router_core.weights import version_named
from slime_control.calls.fan_out import Answer, FanOut
from slime_control.weights.weight_update import Update

__all__ = ["QUIET_S", "Standing", "is_silent", "learn_version", "may_be_restarted", "standing"]

#: State of a worker and the reason for it.
Standing = tuple[str, str | None]

#: Seconds of silence after which an update counts as ended, unless a call ended it before.
QUIET_S = 60.0


def is_silent(update: Update | None, heard_at: float) -> bool:
    """Return True when all pieces of ``update`` were answered, the last one more than ``QUIET_S`` seconds ago."""
    return update is not None and not update.awaited and anyio.current_time() - heard_at > QUIET_S


def standing(worker: Worker) -> Standing:
    return worker.state, worker.reason


def may_be_restarted(worker: Worker, then: Standing | None) -> bool:
    """Return True when ``worker`` is not in use, and is quarantined or has another standing than ``then``."""
    return not worker.in_use and (worker.state == "quarantined" or then != standing(worker))


async def learn_version(
    pool: WorkerPool, fan_out: FanOut, answers: dict[Worker, Answer]
) -> tuple[str | None, bool]:
    """Ask the workers that took an update which version they have. In ``answers``, mark those that name none as failed.

    Returns the version, or None if the workers report none or several. The second value is True when the update surely
    brought this version, because a worker in use had another version before.
    """
    said: set[str] = set()
    is_told = False

    async def ask(worker: Worker) -> None:
        nonlocal is_told
        about = await fan_out.question(worker, b"/model_info", b"/get_model_info")
        version = version_named(about.get("weight_version"))
        if version is not None:
            is_told |= worker.in_use and worker.weight_version not in (None, version)
            pool.set_version(worker, version)
            said.add(version)
        else:
            trouble = "it took the update, but does not say which weights it has"
            answers[worker] = replace(answers[worker], trouble=trouble)

    async with anyio.create_task_group() as tasks:
        for worker, answer in list(answers.items()):
            if answer.trouble is None:
                tasks.start_soon(ask, worker)
    return (said.pop(), is_told) if len(said) == 1 else (None, False)
