"""Places of tokens in the text that they spell."""

from __future__ import annotations

from collections.abc import Iterable

from slime_openai.responses.logprobs import BROKEN, Logprobs
from slime_openai.responses.outputs import Triple

__all__ = ["TextOffsets"]

#: After this many tokens, a character counts as complete: bytes that are no UTF-8 may follow each other without end.
_MOST_TOKENS = 8


class TextOffsets:
    """Counts the characters of a sequence's tokens, as they come. ``place``: the number of characters so far.

    The offset of a token that begins inside a character is the place of this character.
    """

    def __init__(self, logprobs: Logprobs) -> None:
        self.place = 0
        self._logprobs = logprobs
        #: The last tokens if their text ends within a character, and the place of the first of them.
        self._unfinished: list[int] = []
        self._start = 0

    def of(self, triples: Iterable[Triple]) -> list[int]:
        """Return the offset of each of the next tokens."""
        return [self._next(token) for _, token, *_ in triples]

    def _next(self, token: int) -> int:
        place = self.place
        if not self._unfinished:
            self._start = place
        self._unfinished.append(token)
        text = self._logprobs.text_of(self._unfinished)
        is_finished = not text.endswith(BROKEN) or len(self._unfinished) == _MOST_TOKENS
        self.place = self._start + len(text if is_finished else text.rstrip(BROKEN))
        if is_finished:
            self._unfinished.clear()
        return place
