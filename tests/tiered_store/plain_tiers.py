"""Tiers that keep blocks in dicts, and fail or wait when a test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyio import Event
from anyio.lowlevel import checkpoint

from slime_tiered_store.errors import BlockMissing, TierFailed
from slime_tiered_store.tier import Block, BlockKey

__all__ = ["PlainMemory", "PlainShared", "PlainTier"]


class PlainMemory:
    """An arena of bytes. Free blocks hold noise."""

    def __init__(self, block_bytes: int, capacity: int) -> None:
        self.name = "memory"
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._arena = memoryview(bytearray(b"\xee" * (block_bytes * capacity)))

    def stretches(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._arena[number * self.block_bytes :][: self.block_bytes] for number in block_ids]

    async def aclose(self) -> None:
        self._arena.release()


class PlainTier:
    """Slots in a dict. ``failures``: errors of the next operations, None for success. ``gate``: they wait for it.

    ``writes``, ``reads``: the number of blocks moved.
    """

    def __init__(self, block_bytes: int, capacity: int, name: str = "ssd") -> None:
        self.name = name
        self.block_bytes = block_bytes
        self.capacity = capacity
        self.slots: dict[int, tuple[BlockKey, bytes]] = {}
        self.left: dict[BlockKey, int] = {}
        self.failures: list[Exception | None] = []
        self.gate: Event | None = None
        self.started = Event()
        self.writes = self.reads = 0

    def recovered(self) -> Mapping[BlockKey, int]:
        return self.left

    async def write(self, blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
        await self._begin()
        self.write_now(blocks, sources)

    async def read(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        await self._begin()
        self.read_now(blocks, into)

    def write_now(self, blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
        for block, source in zip(blocks, sources, strict=True):
            self.writes += 1
            assert 0 <= block.id < self.capacity
            self.slots[self.place(block)] = (block.key, bytes(source))

    def read_now(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        for block, buffer in zip(blocks, into, strict=True):
            self.reads += 1
            key, data = self.slots.get(self.place(block), (b"", b""))
            if key != block.key:
                raise BlockMissing(self.name, block.key)
            buffer[:] = data

    def forget(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.slots.pop(self.place(block), None)

    def place(self, block: Block) -> int:
        return block.id

    async def _begin(self) -> None:
        self.started.set()
        await checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    async def aclose(self) -> None:
        """Nothing to close."""


class PlainShared(PlainTier):
    """Slots by key. ``unreachable``: the answer to ``holds`` is unknown."""

    def __init__(self, block_bytes: int, capacity: int) -> None:
        super().__init__(block_bytes, capacity, "remote")
        self.unreachable = False

    def place(self, block: Block) -> int:
        return int.from_bytes(block.key)

    async def holds(self, keys: Sequence[BlockKey]) -> int:
        await checkpoint()
        if self.unreachable:
            raise TierFailed(self.name, "holds", "test://", "-1")
        missing = [at for at, key in enumerate(keys) if int.from_bytes(key) not in self.slots]
        return missing[0] if missing else len(keys)
