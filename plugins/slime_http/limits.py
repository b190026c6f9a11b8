"""Deadlines for the answer of a worker, and the largest head that it may send."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, sizes in bytes.

    ``idle_s`` is below 5 s: most engines run on uvicorn, which closes a connection that is idle for 5 s.
    """

    connect_s: float = 5.0
    first_byte_s: float = 1800.0
    silence_s: float = 300.0
    idle_s: float = 4.0
    head_bytes: int = 64 * 1024

    @property
    def tick_s(self) -> float:
        """The seconds between two checks of the deadlines."""
        return min(1.0, self.first_byte_s / 4, self.silence_s / 4, self.idle_s / 4)
