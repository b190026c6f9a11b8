"""Reports of ``radix_cache``: verdicts, which say if an answer's tokens are exact, and sessions that lost something."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from router_core.exchange import Exchange
from slime_sglang import CONTRADICTION

__all__ = ["NOT_RECORDED", "JudgedAnswers", "LostSessions", "Ownership", "Verdicts"]

NOT_RECORDED = "not_recorded"
#: Reasons for which an answer makes no turn: no prompt may continue its tokens.
_UNUSABLE = frozenset((CONTRADICTION, NOT_RECORDED))


class LostSessions(Protocol):
    """The sessions that have lost something. Rarely, a session that was never added counts as one of them."""

    def add(self, name: str, /) -> object:
        """Remember ``name``, for ever."""
        ...

    def __contains__(self, name: str, /) -> bool: ...


class Ownership(Protocol):
    """The component ``"ownership"``: knows all requests of sessions, not only chats."""

    async def may_take(self, ids: bytes, session: str, /) -> bool:
        """Return False if ``session`` sent a beginning of ``ids`` as a prompt, but may not use all of ``ids``.

        Also return False if a store of contexts does not answer. Else return True. ``ids``: packed int32.
        """
        ...


class Verdicts(Protocol):
    """The component ``"verdicts"``."""

    def of(self, exchange: Exchange) -> Sequence[str | None]:
        """Return for each sequence of a ``/generate`` answer the reason why its tokens are not exact.

        None: they are exact so far. The result is empty if the request was passed on untouched.
        """
        ...


class JudgedAnswers:
    """The verdicts on one answer; they stay known after its exchange has ended."""

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts
        self._exchange: Exchange | None = None
        self._last: Sequence[str | None] = ()
        self._known: dict[int, str | None] = {}

    def begin(self, exchange: Exchange) -> None:
        """Judge the answer to the ``/generate`` request of ``exchange``."""
        self._exchange = exchange
        exchange.on_close(partial(self._end, exchange))

    def _end(self, exchange: Exchange) -> None:
        """Keep the verdicts: the exchange drops its notes when it has closed."""
        reasons, known = self._verdicts.of(exchange), self._known
        self._last = [known[index] if index in known else reasons[index] for index in range(len(reasons))]
        self._exchange = None

    def inexact_reason(self, index: int) -> str | None:
        """Return the reason why sequence ``index`` is not exact, or None if it is exact.

        Call this at the last event or later.
        """
        if index not in self._known:
            reasons = self._verdicts.of(self._exchange) if self._exchange is not None else self._last
            self._known[index] = reasons[index] if index < len(reasons) else NOT_RECORDED
        return self._known[index]

    def is_usable(self, index: int) -> bool:
        """Return True when a conversation may continue from the tokens of sequence ``index``."""
        return self.inexact_reason(index) not in _UNUSABLE
