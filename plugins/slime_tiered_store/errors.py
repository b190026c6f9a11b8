"""Errors of the tiered store.

::

    StoreError
    ├── NotEnoughSpaceError   a tier has too few blocks that are free or can be evicted
    │   └── TierFull          a device has no space left, although its pool has free blocks
    ├── TierFailed            an operation of a device failed; ``cause`` is the original error
    │   └── TierBusy          the device did not take a write in time
    ├── BlockMissing          the tier does not hold the block
    ├── BlockCorrupt          the tier holds other bytes than were written
    │   └── BlockReplaced     another process wrote other rows under the same key
    ├── StaleMatch            the index changed between a match and an insert
    ├── RowsDiffer            equal tokens came with other rows
    ├── ResetMeanwhile        a reset came before the blocks were stored
    ├── NotStored             no tier took the rows
    └── RecordLost            a record that was kept is in no tier, or is damaged
"""

from __future__ import annotations

from collections.abc import Mapping

from router_core.errors import RouterError

__all__ = [
    "BlockCorrupt",
    "BlockMissing",
    "BlockReplaced",
    "NotEnoughSpaceError",
    "NotStored",
    "RecordLost",
    "ResetMeanwhile",
    "RowsDiffer",
    "StaleMatch",
    "StoreError",
    "TierBusy",
    "TierFailed",
    "TierFull",
]


class StoreError(RouterError):
    """Base of the errors of the tiered store."""


class NotEnoughSpaceError(StoreError):
    """A tier has too few blocks that are free or can be evicted. ``required`` and ``available`` count blocks."""

    def __init__(self, tier: str, required: int, available: int) -> None:
        super().__init__(f"tier {tier}: {required} blocks are required, {available} are available")
        self.tier = tier
        self.required = required
        self.available = available


class TierFull(NotEnoughSpaceError):
    """The device has no space left (ENOSPC, a quota), although its pool has free blocks."""


class TierFailed(StoreError):
    """An ``operation`` (``"write"``, ``"read"`` or ``"holds"``) failed at ``location`` because of ``cause``.

    ``location``: paths or a URL, if they are known.
    """

    def __init__(self, tier: str, operation: str, location: str, cause: BaseException | str) -> None:
        super().__init__(f"tier {tier}: {operation} at {location} failed: {cause}")
        self.tier = tier
        self.operation = operation
        self.location = location
        self.cause = cause


class TierBusy(TierFailed):
    """A write gave up after it had waited ``waited_s`` seconds for other writes, because the device is too slow.

    ``required`` and ``available`` count bytes; ``waiting`` is the number of other writes that still wait.
    """

    def __init__(
        self, tier: str, location: str, required: int, available: int, waited_s: float, waiting: int
    ) -> None:
        super().__init__(
            tier,
            "write",
            location,
            f"no room for {required} bytes within {waited_s:g} s ({available} bytes are free, {waiting} writes wait)",
        )
        self.required = required
        self.available = available
        self.waited_s = waited_s
        self.waiting = waiting


class _BlockError(StoreError):
    def __init__(self, tier: str, key: bytes, reason: str) -> None:
        super().__init__(f"tier {tier}: block {key.hex()} {reason}")
        self.tier = tier
        self.key = key


class BlockMissing(_BlockError):
    """The tier does not hold the block ``key``."""

    def __init__(self, tier: str, key: bytes) -> None:
        super().__init__(tier, key, "is missing")


class BlockCorrupt(_BlockError):
    """The tier holds other bytes than were written under ``key``; ``reason`` says how they differ."""

    def __init__(self, tier: str, key: bytes, reason: str) -> None:
        super().__init__(tier, key, f"is corrupt: {reason}")
        self.reason = reason


class BlockReplaced(BlockCorrupt):
    """Another process wrote intact rows under ``key``, but not the rows that this process knows."""

    def __init__(self, tier: str, key: bytes) -> None:
        super().__init__(tier, key, "another process wrote other rows")


class StaleMatch(StoreError):
    """An insert got a match that is out of date, or that ends at an unready node. The caller must match again."""


class RowsDiffer(StoreError):
    """A put has other rows than those stored for the same tokens. ``block``: the first block that differs.

    Rows may depend only on the namespace and the tokens. Put anything else they depend on into ``Namespace.variant``.
    """

    def __init__(self, tier: str, block: int) -> None:
        super().__init__(
            f"tier {tier}: the rows of block {block} differ from the rows stored for equal tokens: "
            "put them under another Namespace.variant"
        )
        self.tier = tier
        self.block = block


class ResetMeanwhile(StoreError):
    """The store was reset before the blocks were stored, so ``tier`` forgot them."""

    def __init__(self, tier: str) -> None:
        super().__init__(f"tier {tier}: the store was reset before the blocks were stored")
        self.tier = tier


class NotStored(StoreError):
    """No tier took the rows of a put. ``outcomes`` has the error of each tier."""

    def __init__(self, outcomes: Mapping[str, Exception | None]) -> None:
        super().__init__("no tier took the rows: " + "; ".join(str(error) for error in outcomes.values()))
        self.outcomes = outcomes


class RecordLost(StoreError):
    """``count`` records that were kept are lost. This error ends the router.

    ``first``: the first of these records, the store that had it, and the reason why it is lost.
    """

    def __init__(self, count: int, first: str) -> None:
        super().__init__(
            f"the store has lost {count} {'record' if count == 1 else 'records'} that it had kept, the first one: "
            f"{first}; start the router again; with --store-on-loss mark it goes on after such losses, and marks "
            "sessions without all of their tokens as not complete"
        )
        self.count = count
        self.first = first
