"""The component ``"session_turns"`` of ``radix_cache``, as far as the trajectory viewer reads it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Record", "Source", "Turn", "TurnContext"]


class Turn(Protocol):
    """One response. ``before``: number of the turn that it continues; ``finish_reason`` None: no end was seen.

    ``prompt``: the same for responses to one prompt.
    """

    @property
    def number(self) -> int: ...
    @property
    def before(self) -> int | None: ...
    @property
    def prompt(self) -> Hashable: ...
    @property
    def tokens(self) -> int: ...
    @property
    def finish_reason(self) -> dict[str, Any] | None: ...


class Record(Protocol):
    """Tokens of a context. ``spans``: runs of ``(weight version, count)``, with version -1 for tokens of a prompt."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.int8]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float64]: ...
    @property
    def spans(self) -> tuple[tuple[str | int | None, int], ...]: ...


class TurnContext(Protocol):
    """All tokens up to the end of one turn.

    ``spans``: ``(number, start, end, is_whole)`` of the session's turns in it. ``sampled``: ``(key, start, end)`` of
    all responses, also of other sessions.
    """

    @property
    def record(self) -> Record: ...
    @property
    def spans(self) -> tuple[tuple[int, int, int, bool], ...]: ...
    @property
    def sampled(self) -> tuple[tuple[Hashable, int, int], ...]: ...
    @property
    def inexact_reason(self) -> str | None: ...


class Source(Protocol):
    """The recorded sessions."""

    def turns(self, session: str) -> Sequence[Turn]:
        """Return the turns of ``session``, oldest first."""
        ...

    def context(self, turn: Any, turns: Any) -> TurnContext:
        """Return the context of ``turn``, one of ``turns``. Any thread may call it."""
        ...

    def rows(self, name: str, turn: Any, tokens: int) -> npt.NDArray[np.integer[Any]] | str | None:
        """Return the rows ``name`` of the first ``tokens - 1`` tokens up to ``turn``, or why they are not known.

        None: no plugin records rows. Any thread may call it.
        """
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens spelt out."""
        ...

    def has_lost(self, session: str) -> bool:
        """Return True when something of ``session`` is lost, or could not be recorded as exact."""
        ...
