"""Graphs of transfers between tiers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from slime_tiered_store.tier import Block

__all__ = ["OpStatus", "TransferOp", "TransferOpGraph", "TransferType"]


class TransferType(Enum):
    """The direction of a transfer. H is host memory. D2H copies the caller's rows into host memory.

    ``VIRTUAL`` moves nothing: it waits for several other operations.
    """

    D2H = auto()
    H2DISK = auto()
    DISK2H = auto()
    H2REMOTE = auto()
    REMOTE2H = auto()
    VIRTUAL = auto()


class OpStatus(Enum):
    """The state of an operation. The last two are final."""

    PENDING = auto()
    READY = auto()
    RUNNING = auto()
    COMPLETED = auto()
    ABORTED = auto()


class TransferOp:
    """One transfer of ``blocks`` from or into ``buffers``, one buffer a block, and then ``work``, if there is any.

    ``work()`` copies or verifies ``num_bytes`` bytes, and touches nothing else, so that it may run in a thread. If it
    raises, the operation fails.

    ``on_end(error)`` is called exactly once, when the operation has completed (with None) or will never complete. It
    normally returns the error it was given. If it returns or raises another error, the operation fails with that error.
    """

    __slots__ = (
        "blocks",
        "buffers",
        "graph",
        "num_bytes",
        "num_unfinished_predecessors",
        "on_end",
        "predecessors",
        "status",
        "successors",
        "transfer_type",
        "work",
    )

    def __init__(
        self,
        transfer_type: TransferType,
        blocks: list[Block],
        buffers: list[memoryview],
        on_end: Callable[[Exception | None], Exception | None] = lambda error: error,
        work: Callable[[], None] | None = None,
        num_bytes: int | None = None,
    ) -> None:
        if len(blocks) != len(buffers):
            raise ValueError(f"{len(blocks)} blocks do not fit {len(buffers)} buffers")
        self.transfer_type = transfer_type
        self.blocks = blocks
        self.buffers = buffers
        self.on_end = on_end
        self.work = work
        self.num_bytes = sum(map(len, buffers)) if num_bytes is None else num_bytes
        self.status = OpStatus.PENDING
        self.predecessors: list[TransferOp] = []
        self.num_unfinished_predecessors = 0
        self.successors: list[TransferOp] = []
        self.graph: TransferOpGraph | None = None

    def add_predecessor(self, op: TransferOp) -> None:
        """Let this operation start only when ``op`` has completed.

        Raises ``ValueError`` if this operation is in a graph already.
        """
        if self.graph is not None:
            raise ValueError("an operation gets its predecessors before it is added to a graph")
        self.predecessors.append(op)

    @property
    def has_ended(self) -> bool:
        """True in a final state."""
        return self.status in (OpStatus.COMPLETED, OpStatus.ABORTED)


class TransferOpGraph:
    """Operations that depend on one another, and callbacks, each called at most once. What a callback raises is logged.

    ``on_ready()`` is called when the operation ``task_end_op`` has completed. If there is no such operation,
    ``on_ready()`` is called at the start. When all operations have ended, ``on_complete()`` is called, or
    ``on_abort(error)`` with the first error.
    """

    def __init__(self) -> None:
        self.ops: list[TransferOp] = []
        self.task_end_op: TransferOp | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_complete: Callable[[], None] = lambda: None
        self.on_abort: Callable[[Exception], None] = lambda error: None
        self.first_error: Exception | None = None
        self.num_unfinished = 0

    def add_transfer_op(self, op: TransferOp) -> TransferOp:
        """Add an operation. Its predecessors must be in the graph already, so a graph has no cycles.

        Raises ``ValueError`` if a predecessor is not in the graph, or if the operation is in a graph already.
        """
        if op.graph is not None or any(each.graph is not self for each in op.predecessors):
            raise ValueError("an operation belongs to one graph, and so do its predecessors")
        op.graph = self
        op.num_unfinished_predecessors = len(op.predecessors)
        for each in op.predecessors:
            each.successors.append(op)
        self.ops.append(op)
        self.num_unfinished += 1
        return op
