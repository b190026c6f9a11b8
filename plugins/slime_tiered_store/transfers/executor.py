"""Runs transfers on the tiers."""

from __future__ import annotations

from collections.abc import Mapping

from anyio import Event, get_cancelled_exc_class
from anyio.abc import TaskGroup

from slime_tiered_store.errors import StoreError, TierFailed
from slime_tiered_store.off_loop import is_long, run_work
from slime_tiered_store.tier import Tier
from slime_tiered_store.transfers.graph import TransferOp, TransferOpGraph, TransferType
from slime_tiered_store.transfers.scheduler import TransferScheduler

__all__ = ["TransferExecutor"]

_READS = (TransferType.DISK2H, TransferType.REMOTE2H)


class TransferExecutor:
    """Starts each operation as a task of ``task_group`` once it is ready. A short copy is done at once, without a task.

    ``tiers``: the tier (SSD or remote) of each type of transfer that reads or writes such a tier. When the task group
    is cancelled, running and waiting operations are aborted, so all callbacks are called.
    """

    def __init__(self, tiers: Mapping[TransferType, Tier], task_group: TaskGroup) -> None:
        self.scheduler = TransferScheduler()
        self._tiers = tiers
        self._task_group = task_group
        self._ended = Event()

    def submit(self, graph: TransferOpGraph) -> None:
        """Start a graph. It goes on even if the caller is cancelled."""
        self.scheduler.submit(graph)
        self._start_ready()

    async def next_end(self) -> None:
        """Wait until an operation ends. If none is under way, return at once."""
        if self.scheduler.graphs:
            await self._ended.wait()

    def _start_ready(self) -> None:
        for op in self.scheduler.next_ops():
            if op.transfer_type in self._tiers or is_long(op.num_bytes):
                self._task_group.start_soon(self._run, op)
            else:  # a short copy: a task would take longer
                self.scheduler.finish(op, _failure(op))

    async def _run(self, op: TransferOp) -> None:
        error: Exception | None = None
        try:
            await self._move(op)
        except StoreError as failure:
            error = failure
        except Exception as failure:  # a tier of a third party may raise anything: only this operation fails
            error = self._failed(op, failure)
        except get_cancelled_exc_class():
            closed = self._failed(op, "the store was closed")
            self.scheduler.finish(op, closed)
            for graph in list(self.scheduler.graphs):
                self.scheduler.abort(graph, closed)
            self._tell_end()
            raise
        self.scheduler.finish(op, error)
        self._start_ready()
        self._tell_end()

    def _tell_end(self) -> None:
        self._ended.set()
        self._ended = Event()

    async def _move(self, op: TransferOp) -> None:
        if tier := self._tiers.get(op.transfer_type):
            await (tier.read if op.transfer_type in _READS else tier.write)(op.blocks, op.buffers)
        if op.work is not None:
            await run_work(op.num_bytes, op.work)

    def _failed(self, op: TransferOp, cause: Exception | str) -> TierFailed:
        tier = self._tiers.get(op.transfer_type)
        action = "read" if op.transfer_type in _READS else "write"
        return TierFailed(tier.name if tier is not None else "memory", action, "an unknown place", cause)


def _failure(op: TransferOp) -> Exception | None:
    """Do the work of a copy. Return the error that it raises, else None."""
    try:
        if op.work is not None:
            op.work()
    except Exception as failure:
        return failure
    return None
