"""Counters of a tier, for metrics and for ``GET /store``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_tiered_store.tiers.block_header import Buffer

__all__ = ["TierCounts"]


@dataclass(slots=True)
class TierCounts:
    """Counters of a tier since its start.

    ``waits``: writes that waited for others, for ``waited_s`` seconds in all. ``refused``: writes that gave up waiting.
    ``pending_bytes``: bytes of the writes under way. ``errors``: failed calls. ``last_error``: the message of the last
    failed call. ``is_failing``: True from a failure until a write succeeds. If only reads have failed, it is True only
    until a read or a write succeeds. ``missing``, ``corrupt``: blocks that reads did not find, or found corrupt.
    """

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    missing: int = 0
    corrupt: int = 0
    errors: int = 0
    waits: int = 0
    waited_s: float = 0.0
    refused: int = 0
    pending_bytes: int = 0
    is_failing: bool = False
    last_error: str = ""
    _has_failed_change: bool = field(default=False, repr=False)

    def wrote(self, blocks: Sequence[Buffer]) -> None:
        """Count blocks that were written."""
        self.written_blocks += len(blocks)
        self.written_bytes += sum(map(len, blocks))
        self.is_failing = self._has_failed_change = False

    def read(self, blocks: Sequence[Buffer]) -> None:
        """Count blocks that were read."""
        self.read_blocks += len(blocks)
        self.read_bytes += sum(map(len, blocks))
        if blocks:
            self.is_failing = self._has_failed_change

    def failed(self, error: BaseException, operation: str) -> int:
        """Count a failed call of ``operation`` (``"read"``, ``"holds"``, ``"write"`` or ``"delete"``).

        Return the level for the log: ERROR for the first failure in a row, then DEBUG.
        """
        level = logging.DEBUG if self.is_failing else logging.ERROR
        self.errors += 1
        self.is_failing = True
        self._has_failed_change |= operation not in ("read", "holds")
        self.last_error = str(error)
        return level

    def as_dict(self) -> dict[str, Any]:
        """Return the counters by name."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}
