"""The interface of a tier: a place that keeps blocks of equal size.

The engine of the store (see ``engine``) decides which block lies where; a tier moves bytes and takes no decision. There
are three kinds of tiers:

- ``MemoryTier``: an arena. The engine reads and writes its blocks in place.
- ``Tier``: a device with slots, such as files on an SSD. A block lies in the slot ``Block.id``.
- ``SharedTier``: a remote store that other processes use too. A block lies under ``Block.key``; its id is ignored.

The bytes of a block are opaque to a tier. They begin with the engine's own header, see ``frames.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

__all__ = ["Block", "BlockKey", "MemoryTier", "SharedTier", "Tier", "check_ids", "ends_of_runs"]

#: An XXH3-128 digest of the namespace, and of the tokens of a block and of all blocks before it: 16 bytes.
BlockKey: TypeAlias = bytes


class Block(NamedTuple):
    """A block of a tier: its slot (0 <= ``id`` < ``capacity``) and its key."""

    id: int
    key: BlockKey


@runtime_checkable
class MemoryTier(Protocol):
    """An arena of ``capacity`` blocks of ``block_bytes`` bytes, allocated at once."""

    name: str
    block_bytes: int
    capacity: int

    def stretches(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the writable bytes of the blocks in the order of ``block_ids``, valid until ``aclose``.

        Blocks with consecutive ids may share a view, which has ``block_bytes`` bytes for each of them. Raises
        IndexError for an id that no block has.
        """

    async def aclose(self) -> None:
        """Release the arena."""


class Tier(Protocol):
    """A device that holds ``capacity`` blocks of ``block_bytes`` bytes.

    The engine never writes and reads the same slot at once, and writes only slots that were free or forgotten.
    Several calls for different blocks may run at the same time. Each call may be cancelled: a cancelled write leaves
    its slots undefined. No I/O uses the caller's buffers once the call has ended.
    """

    name: str
    block_bytes: int
    capacity: int

    def recovered(self) -> Mapping[BlockKey, int]:
        """Return the slots of the blocks that an earlier process left, by key. Empty for a ``SharedTier``."""

    async def write(self, blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
        """Store all blocks, or raise. They are durable when the call returns.

        ``sources[i]`` has the bytes of ``blocks[i]``, at most ``block_bytes`` of them; the rest of the block is
        undefined. If the call raises, none of the blocks counts as stored; the engine forgets them.

        Raises ``TierFull`` (no space left on the device) or ``TierFailed`` (any other error, such as a short write).
        """

    async def read(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        """Fill each ``into[i]`` with the first ``len(into[i])`` bytes of ``blocks[i]``. Raise if one of them fails.

        The tier verifies the key and its own checksum before it returns.

        Raises ``BlockMissing`` or ``BlockCorrupt`` (a wrong key or checksum), which name the first such block, or
        ``TierFailed`` (the device failed, or a read was short). A server that cannot be reached, or an answer that
        is not understood, is ``TierFailed``, never ``BlockMissing``.
        """

    def forget(self, blocks: Sequence[Block]) -> None:
        """Drop the contents of blocks, at once for this process.

        Slots and keys without a block are ignored. A later start finds the blocks only if this process dies before
        the tier has recorded the removal. A later ``write`` of the same key or slot is never undone by this call.
        """

    async def aclose(self) -> None:
        """Finish the removal of forgotten blocks, then close files and connections."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier to which other processes write, too. Blocks are found by their keys."""

    async def holds(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading ``keys`` that are stored.

        Raises ``TierFailed`` when the answer is unknown, instead of returning 0.
        """


def check_ids(name: str, capacity: int, ids: Sequence[int]) -> None:
    """Raise IndexError if one of ``ids`` is no block of the tier ``name``, which has ``capacity`` blocks."""
    if ids and not 0 <= min(ids) <= max(ids) < capacity:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise IndexError(f"tier {name} has the blocks 0 to {capacity - 1}, not {wrong}")


def ends_of_runs(ids: Sequence[int]) -> list[int]:
    """Return, for each run of consecutive ids, the place in ``ids`` behind its last id. Return [] for no ids."""
    if ids and list(ids) == list(range(ids[0], ids[0] + len(ids))):  # the usual case
        return [len(ids)]
    return [
        place for place in range(1, len(ids) + 1) if place == len(ids) or ids[place] != ids[place - 1] + 1
    ]
