"""The plugin: saves most changes before the client gets its answer, and restores the state at the next start."""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from router_core import Exchange, Worker, hookimpl
from router_core.errors import BadRequest, SettingsError
from router_core.router import Router
from router_core.weights import WeightUpdate
from router_core.workers import JOINING, WorkerChange
from slime_sglang.generation import GENERATION_PATHS
from slime_state.directory import StateDirectory
from slime_state.snapshot import SavedWorker, Snapshot

__all__ = ["State", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
#: Owner of the hold of a worker that was stale, or came back with other weights.
_OWNER = "state"


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="save the workers and the weight version in DIR, and restore them at the next start",
    )


def make_plugin(options: argparse.Namespace) -> State:
    """Return the plugin with the flags of the command line. Raises SettingsError without a directory."""
    if options.state_dir is None:
        raise SettingsError("--plugin state needs --state-dir DIR, the directory to keep the workers in")
    return State(options.state_dir)


class State:
    """Writes the whole state at each change, since changes are rare."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory: StateDirectory | None = None
        self._router: Router | None = None
        self._written: list[object] = []

    @hookimpl
    def setup(self, router: Router) -> None:
        """Lock the directory, and read the saved state. Raises StartupError."""
        self._pool = router.pool
        self._directory = StateDirectory(self._path)
        try:
            self._snapshot = self._directory.read()
        except BaseException:
            self._directory.close()
            raise

    @hookimpl(trylast=True)  # the other lifespans are open, so their plugins see the workers restored
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        assert self._directory is not None  # from setup
        await self._restore(router, self._snapshot)
        self._router = router
        try:
            self._write()
            router.tasks.start_soon(self._watch)
            yield
        finally:
            self._router = None
            self._directory.close()

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        self._write()

    @hookimpl
    def weights_confirmed(self, worker: Worker) -> None:
        self._pool.release(worker, _OWNER)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self._write()

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        """Write what a control call changed, before its answer goes out: no hook reports a worker's version."""
        if exchange.request.target not in GENERATION_PATHS:
            self._write_news()

    async def _watch(self) -> None:
        """Write every second what no hook reports, such as a new worker's version. No client waits for it."""
        while True:
            await anyio.sleep(_WATCH_S)
            try:
                self._write_news()
            except OSError as error:
                logger.error("the state of the workers cannot be saved: %s", error)

    def _write_news(self) -> None:
        if self._router is not None and _without_hooks(self._router) != self._written:
            self._write()

    def _write(self) -> None:
        if self._router is not None and self._directory is not None:
            self._directory.write(Snapshot.of(self._router.pool, self._router.weights))
            self._written = _without_hooks(self._router)

    async def _restore(self, router: Router, snapshot: Snapshot) -> None:
        """Restore ``snapshot``, except draining workers and refused URLs. Register ready and joining workers anew."""
        for version in snapshot.versions:
            router.weights.see(version)
        if snapshot.current is not None:
            for version in (*snapshot.versions, snapshot.current):
                router.weights.move(version, "state")  # a restored version is no update, so no hook is called
        there = [
            saved for saved in snapshot.workers if saved.state != "draining" and _is_allowed(router, saved)
        ]
        behind: list[Worker] = []
        async with anyio.create_task_group() as tasks:
            for saved in there:
                worker = router.pool.add(saved.restored())
                if saved.torn:
                    router.pool.hold(worker, "control", saved.reason or "it failed a control call", "stale")
                elif saved.state == "stale":
                    router.pool.hold(worker, _OWNER, saved.reason or "it was stale", "stale")
                if saved.state == "quarantined":
                    router.pool.hold(worker, "health", saved.reason or "it was quarantined", "quarantined")
                if saved.state in ("stale", "quarantined"):
                    router.pool.release(worker, JOINING)
                else:
                    tasks.start_soon(_join, router, saved, behind)
        current = router.weights.current
        for worker in behind:  # after all were asked, since their answers may change the fleet's version
            reason = f"it came back with weights {worker.weight_version!r}, not {current!r}"
            router.pool.hold(worker, _OWNER, reason, "stale")
        logger.info("restored %d workers, weights at version %s", len(there), snapshot.current)


def _is_allowed(router: Router, saved: SavedWorker) -> bool:
    """Return True when ``saved`` may be a worker under the rules of the present command line."""
    try:
        router.addresses.check(saved.url)
    except BadRequest as error:
        logger.warning("a saved worker is not restored: %s", error)
        return False
    return True


def _without_hooks(router: Router) -> list[object]:
    """Return the part of the state that may change without a call of a hook."""
    pool = router.pool
    about = ((dict(worker.holds), worker.weight_version) for worker in pool)
    registered = ((dict(each.facts), each.labels, each.api_key) for each in pool)
    return [router.weights.current, *about, *registered]


async def _join(router: Router, saved: SavedWorker, behind: list[Worker]) -> None:
    """Register a worker, and wait until it was asked once. If it was ready and does not answer, quarantine it.

    If it was ready and answers, compare its version (the one that it reports, else the saved one) with the fleet's. If
    both are known and differ, append the worker to ``behind``, unless the workers serve different models.
    """
    worker, trouble = await router.add_worker(
        saved.url,
        worker_type=saved.worker_type,
        facts=saved.facts,
        labels=dict(saved.labels),
    )
    current = router.weights.current
    if saved.state == "joining":
        return  # the router keeps asking it, as before
    if trouble is not None:
        reason = f"it was not ready when the router started: {trouble}"
        router.pool.hold(worker, "health", reason, "quarantined")
        router.pool.release(worker, JOINING)
    elif router.weights.differ():
        return
    elif None not in (current, worker.weight_version) and worker.weight_version != current:
        behind.append(worker)
