"""The bootstrap room, where a prefill engine hands a sequence over to a decode engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Room"]


@dataclass(frozen=True, slots=True)
class Room:
    """Room ``number`` at the bootstrap address. ``dp_rank``: the prefill engine's rank, None if not given."""

    host: str | None
    port: int | None
    number: int
    dp_rank: int | None = None
