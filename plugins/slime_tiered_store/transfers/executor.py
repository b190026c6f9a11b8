"""Runs transfers on the tiers."""

from __future__ import annotations

from collections.abc import Mapping

from anyio import get_cancelled_exc_class
from anyio.abc import TaskGroup

from slime_tiered_store.errors import StoreError, TierFailed
from slime_tiered_store.tier import Tier
from slime_tiered_store.transfers.graph import TransferOp, TransferOpGraph, TransferType
from slime_tiered_store.transfers.scheduler import TransferScheduler

__all__ = ["TransferExecutor"]

_READS = (TransferType.DISK2H, TransferType.REMOTE2H)


class TransferExecutor:
    """Starts each operation as a task of ``task_group`` once it is ready.

    ``tiers``: the lower tier of each type of transfer. A task group that is cancelled aborts what runs and what
    waits, so all callbacks are called.
    """

    def __init__(self, tiers: Mapping[TransferType, Tier], task_group: TaskGroup) -> None:
        self.scheduler = TransferScheduler()
        self._tiers = tiers
        self._task_group = task_group

    def submit(self, graph: TransferOpGraph) -> None:
        """Start a graph. It goes on when the caller is cancelled."""
        self.scheduler.submit(graph)
        self._start_ready()

    def _start_ready(self) -> None:
        for op in self.scheduler.next_ops():
            self._task_group.start_soon(self._run, op)

    async def _run(self, op: TransferOp) -> None:
        tier = self._tiers[op.transfer_type]
        is_read = op.transfer_type in _READS
        action = "read" if is_read else "write"
        error: Exception | None = None
        try:
            if is_read:
                await tier.read(op.blocks, op.buffers)
            else:
                await tier.write(op.blocks, op.buffers)
        except StoreError as failure:
            error = failure
        except Exception as failure:  # a tier of a third party may raise anything: it costs one operation
            error = TierFailed(tier.name, action, "an unknown place", failure)
        except get_cancelled_exc_class():
            closed = TierFailed(tier.name, action, "the store", "the store was closed")
            self.scheduler.finish(op, closed)
            for graph in list(self.scheduler.graphs):
                self.scheduler.abort(graph, closed)
            raise
        self.scheduler.finish(op, error)
        self._start_ready()
