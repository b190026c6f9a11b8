"""Decides which transfer may start."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from slime_tiered_store.transfers.graph import OpStatus, TransferOp, TransferOpGraph, TransferType

__all__ = ["TransferScheduler"]

logger = logging.getLogger(__name__)


class TransferScheduler:
    """The operations that are ready to start, from all graphs, first in, first out.

    Only a submission or the end of an operation changes what is ready, so graphs that wait cost nothing.
    The scheduler does no I/O and has no clock. Callbacks run within ``submit``, ``finish`` and ``abort``.
    """

    def __init__(self) -> None:
        self.graphs: dict[TransferOpGraph, None] = {}
        self._ready: deque[TransferOp] = deque()

    def submit(self, graph: TransferOpGraph) -> None:
        """Schedule the operations of a graph. An empty graph is complete at once.

        Raises ``ValueError`` if operations of the graph were submitted before.
        """
        if graph in self.graphs or any(op.status is not OpStatus.PENDING for op in graph.ops):
            raise ValueError("this graph has been submitted already")
        self.graphs[graph] = None
        if graph.task_end_op is None:
            _tell(graph.on_ready)
        for op in [op for op in graph.ops if not op.num_unfinished_predecessors]:
            self._make_ready(op)
        self._end_graph(graph)

    def next_ops(self) -> Iterator[TransferOp]:
        """Yield each operation that may start now. The caller calls ``finish`` when an operation ends."""
        while self._ready:
            op = self._ready.popleft()
            if op.status is OpStatus.READY:
                op.status = OpStatus.RUNNING
                yield op

    def finish(self, op: TransferOp, error: Exception | None = None) -> None:
        """End a running operation. If there is an ``error``, the operations that depend on ``op`` are aborted.

        Raises ``ValueError`` for an operation that does not run.
        """
        if op.status is not OpStatus.RUNNING:
            raise ValueError(f"only a running operation can end, this one is {op.status.name}")
        self._end(op, error)

    def abort(self, graph: TransferOpGraph, error: Exception) -> None:
        """Abort all operations that have not started. The graph ends when no operation runs any more."""
        for op in graph.ops:
            if op.status in (OpStatus.PENDING, OpStatus.READY):
                self._end(op, error)

    def _make_ready(self, op: TransferOp) -> None:
        if op.transfer_type is TransferType.VIRTUAL:
            self._end(op, None)
        elif op.status is OpStatus.PENDING:
            op.status = OpStatus.READY
            self._ready.append(op)

    def _end(self, op: TransferOp, error: Exception | None) -> None:
        """End an operation, and all operations that end because of it.

        This is a loop, since a recursion could be too deep: chains of operations may be long.
        """
        ending = [(op, error)]
        while ending:
            op, error = ending.pop()
            graph = op.graph
            if op.has_ended or graph is None:
                continue
            op.status = OpStatus.ABORTED if error else OpStatus.COMPLETED
            error = _callback(op, error)
            if error:
                op.status = OpStatus.ABORTED
                graph.first_error = graph.first_error or error
            # These fields refer to the plan, and the plan refers to the graph. Only the garbage collector would free
            # this cycle, and with it the plan's frames (the memory of its blocks). In the server, the collector hardly
            # ever looks at objects that have lived as long as an I/O takes.
            op.buffers, op.predecessors, op.work, op.on_end, op.graph = [], [], None, _no_end, None
            graph.num_unfinished -= 1
            for each in op.successors:
                each.num_unfinished_predecessors -= 1
                if error:
                    ending.append((each, error))
                elif not each.num_unfinished_predecessors and each.transfer_type is TransferType.VIRTUAL:
                    ending.append((each, None))
                elif not each.num_unfinished_predecessors:
                    self._make_ready(each)
            if op is graph.task_end_op and not error:
                _tell(graph.on_ready)
            self._end_graph(graph)

    def _end_graph(self, graph: TransferOpGraph) -> None:
        if graph.num_unfinished or graph not in self.graphs:
            return
        del self.graphs[graph]
        if graph.first_error is None:
            _tell(graph.on_complete)
        else:
            _tell(partial(graph.on_abort, graph.first_error))


def _tell(callback: Callable[[], None]) -> None:
    """Call the callback of a graph. If the callback raises, the error is logged, and all graphs go on."""
    try:
        callback()
    except Exception:
        logger.exception("The callback of a graph of transfers failed")


def _no_end(error: Exception | None) -> Exception | None:
    return error


def _callback(op: TransferOp, error: Exception | None) -> Exception | None:
    """Call ``on_end`` of ``op``. Return the error with which ``op`` ends: what the callback returns, or raises."""
    try:
        return op.on_end(error)
    except Exception as failure:
        logger.exception("The callback of a transfer of %d blocks failed", len(op.blocks))
        return failure
