"""Verdicts on answers, for plugins that convert them to another format. The component ``"verdicts"``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from router_core.exchange import Exchange
from slime_radix_cache.capture.turns import PromptTurn
from slime_radix_cache.contracts import TokenCounts
from slime_radix_cache.index.segments import doubt_of
from slime_radix_cache.retrieval.answer import has_logprobs, reason_of_record

__all__ = ["NOTE", "Verdicts"]

#: The name of the note with the turns of an exchange. The note is an object with ``turns``.
NOTE = "radix_cache"
_NOT_RECORDED = "not_recorded"


class Verdicts:
    """The tokens of a ``/generate`` request, and the reasons why their records are not exact."""

    def counts(self, exchange: Exchange) -> TokenCounts | None:
        """See :class:`slime_radix_cache.contracts.RecordedTokens`."""
        noted: Any = exchange.notes.get(NOTE)
        if noted is None:
            return None
        turns: Sequence[PromptTurn] = noted.turns
        responses = [turn.response for turn in turns]
        completion = [len(response) for response in responses if response is not None]
        return TokenCounts(
            sum(turn.tokens for turn in turns),
            sum(turn.tokens - len(turn.rest) // 4 for turn in turns),
            sum(completion) if len(completion) == len(turns) else None,
        )

    def of(self, exchange: Exchange) -> Sequence[str | None]:
        """Return the ``inexact_reason`` of each sequence, as in ``/trajectories``; None if the sequence is exact.

        ``not_recorded``: no answer is recorded (yet). The result is empty if the request was passed on untouched. When
        to call this: see :class:`slime_radix_cache.contracts.RecordedTokens`. Reading one item is O(1), or O(sampled
        tokens) if something in its context was not exact when it was recorded.
        """
        noted: Any = exchange.notes.get(NOTE)
        return _Reasons(noted.turns if noted is not None else ())


class _Reasons(Sequence[str | None]):
    """The reasons for ``turns``, each computed when it is read."""

    def __init__(self, turns: Sequence[PromptTurn]) -> None:
        self._turns = turns

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str | None]:
        return map(_reason, self._turns)  # the inherited method would count up to an IndexError

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str | None] | None:
        if isinstance(index, slice):
            return [_reason(turn) for turn in self._turns[index]]
        return _reason(self._turns[index])


def _reason(turn: PromptTurn) -> str | None:
    if turn.response is None:
        return _NOT_RECORDED
    if turn.response.is_sound:  # known since it was recorded
        return None
    context = turn.response, len(turn.response)
    # With a doubt, the doubt is the reason, so the logprobs are not checked.
    is_complete = doubt_of(context) is not None or has_logprobs(context, turn.session)
    return reason_of_record(context, has_logprobs=is_complete)
