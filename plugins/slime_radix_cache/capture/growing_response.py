"""Recording of a response that grows."""

from __future__ import annotations

from typing import Any

from slime_radix_cache.capture.turns import PromptTurn, Turns
from slime_radix_cache.index.segments import Response
from slime_sglang import sampled_ids

__all__ = ["GrowingResponse"]


class GrowingResponse:
    """A response that is recorded in part, and again with more tokens. The part is removed if nothing continues it."""

    def __init__(self, recorder: Turns, turn: PromptTurn) -> None:
        self._recorder = recorder
        self._turn = turn
        self._part: Response | None = None

    def record(self, answer: Any, doubt: str | None = None, *, is_whole: bool = True) -> None:
        """Record ``answer``, unless a longer part is recorded already. Other arguments: see :meth:`Turns.record`."""
        part = self._part
        if part is not None and len(part) > len(sampled_ids(answer)):
            return
        response = self._recorder.record(self._turn, answer, doubt, is_whole=is_whole, instead_of=part)
        if response is not None:
            self._part = response

    def is_now(self, response: Response) -> bool:
        """Return True if ``response`` is the record so far."""
        return self._part is response

    def begin_anew(self) -> None:
        """Let the recorded part stay unchanged: the next answer is another response."""
        self._part = self._turn.lost = None
