"""The needs of a resumed generation: whatever spells tokens, counts and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime_sglang import AnswerSoFar

__all__ = ["Spelling", "StreamRecorder", "Tally"]


class Spelling(Protocol):
    """Compares tokens with the text that an engine gave for them."""

    def tail(self, ids: Sequence[int], text: str, reason: Any = None) -> tuple[int, str] | None:
        """The number of ``ids`` that ``text`` shows, and what the others say; None when ``ids`` do not spell ``text``.

        A text may lack what its finish ``reason`` explains.
        """
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """All that ``ids`` say, special tokens spelt out."""
        ...


class Tally(Protocol):
    """Counts what became of aborted generations."""

    def aborted(self, outcome: str) -> None:
        """An engine aborted a generation by itself: ``tried_again``, ``resumed``, ``completed`` as it was, or
        ``passed_on`` to the client."""
        ...

    def unrecorded(self, kind: str, error: Exception | None = None) -> None:
        """An attempt was thrown away because of ``error``."""
        ...


class StreamRecorder(Protocol):
    """Records a stream of one sequence while the client reads it.

    ``doubt`` says why what was told so far is not to be believed; None: it is.
    """

    doubt: Callable[[], str | None]

    def so_far(self) -> AnswerSoFar:
        """The sequence, as far as the client was told of it. A copy."""
        ...

    def keep(self, answer: dict[str, Any]) -> None:
        """Record an aborted answer that the client does not see: the beginning of what comes."""
        ...

    def begin_anew(self) -> None:
        """Keep what came as a fact of its own: from now on it is sampled anew."""
        ...

    def failed(self, error: Exception) -> None:
        """Something of the stream was not understood: what was recorded of it is not to be believed any more."""
        ...
