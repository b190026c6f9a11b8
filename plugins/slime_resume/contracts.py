"""Protocols of the objects that a resumed generation needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime_sglang import AnswerSoFar

__all__ = ["Spelling", "StreamRecorder", "Tally"]


class Spelling(Protocol):
    """Compares tokens with the text that an engine gave for them."""

    def tail(self, ids: Sequence[int], text: str, reason: Any = None) -> tuple[int, str] | None:
        """Return the number of ``ids`` that ``text`` shows, and the text of the other ids.

        Returns None if ``ids`` do not spell ``text``. ``reason``: the finish reason, which may explain why a part of
        the text is missing, such as a trimmed stop string.
        """
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        ...


class Tally(Protocol):
    """Counts the outcomes of aborted generations."""

    def aborted(self, outcome: str) -> None:
        """Count an aborted generation.

        Outcomes: ``tried_again``, ``resumed``, ``completed`` (the last token of the aborted answer met a stop
        condition, so the answer was whole), ``passed_on`` (the client got the abort).
        """
        ...


class StreamRecorder(Protocol):
    """Records a stream of one sequence while the client reads it.

    ``doubt`` returns the reason why the token ids of the stream so far cannot be trusted, or None.
    """

    doubt: Callable[[], str | None]

    @property
    def growth(self) -> Callable[[bytes], object | None]:
        """See ``slime_sglang.event_readers.EventReader``."""
        ...

    def so_far(self) -> AnswerSoFar:
        """Return a copy of the part of the sequence that the client has got."""
        ...

    def keep(self, answer: dict[str, Any]) -> None:
        """Record an aborted answer that the client does not see; the next attempts may continue it."""
        ...

    def begin_anew(self) -> None:
        """Begin a new response in the record; what was recorded so far stays a response of its own."""
        ...

    def failed(self, error: Exception) -> None:
        """Note that the token ids of the recorded stream cannot be trusted, because of ``error``."""
        ...
