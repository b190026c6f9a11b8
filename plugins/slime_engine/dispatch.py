"""Dispatch of requests to data-parallel ranks, as SGLang's controller does it."""

from __future__ import annotations

from slime_engine.requests import GenerateRequest
from slime_engine.settings import Settings

__all__ = ["Dispatcher"]


class Dispatcher:
    """Chooses the rank of each request: the rank that the request names, else the next rank in turn.

    If a request to a prefill engine names no rank but a bootstrap room, the rank is the room's number modulo the number
    of ranks. So a decode engine can compute the prefill engine's rank (SGLang: ``follow_bootstrap_room``).
    """

    def __init__(self, settings: Settings) -> None:
        self._ranks = settings.dp_size
        self._follows_rooms = settings.disaggregation_mode == "prefill"
        self._next = 0

    def rank_of(self, request: GenerateRequest) -> int:
        """Return the rank for ``request``."""
        if request.dp_rank is not None:
            return request.dp_rank
        if self._follows_rooms and request.room is not None:
            return request.room.number % self._ranks
        rank, self._next = self._next, (self._next + 1) % self._ranks
        return rank
