"""Counters of the cache's work; each kind of trouble is logged once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

__all__ = ["Tally"]

logger = logging.getLogger(__name__)


class Tally:
    """Counters behind ``get_stats()``.

    A *turn* is a prompt that was rewritten; it is a *hit* when some of its tokens were known. Turns are numbered
    by the responses before them in their context, so what starts afresh counts as turn 1.
    """

    def __init__(self) -> None:
        self.tokens_reused = 0
        self.tokens_encoded = 0
        self._turns: Counter[int] = Counter()
        self._hits: Counter[int] = Counter()
        self._untouched: Counter[str] = Counter()
        self._unrecorded: Counter[str] = Counter()
        self._contradictions: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._aborts: Counter[str] = Counter()

    def turn(self, number: int, reused: int, encoded: int) -> None:
        """A prompt was rewritten: ``reused`` tokens known, ``encoded`` made."""
        self._turns[number] += 1
        self._hits[number] += reused > 0
        self.tokens_reused += reused
        self.tokens_encoded += encoded

    def untouched(self, reason: str) -> None:
        """A ``/generate`` was passed on as it was: nothing of it will be exact."""
        self._untouched[reason] += 1

    def unrecorded(self, kind: str, error: Exception | None = None, worker: str | None = None) -> None:
        """Something of an answer was not kept, or not believed. The first of a kind is logged.

        A ValueError says what is wrong with what ``worker`` sent; any other error is ours, so it is traced.
        """
        self._unrecorded[kind] += 1
        if self._unrecorded[kind] > 1:
            return
        told = isinstance(error, ValueError)
        logger.warning(
            "not recorded: %s%s%s (further ones are only counted)",
            kind,
            f", by worker {worker}" if worker is not None else "",
            f": {error}" if told else "",
            exc_info=None if told else error,
        )

    def contradicted(self, figure: str) -> None:
        """An engine's ``figure`` contradicts another one, or the request. The first of a kind is logged."""
        self._contradictions[figure] += 1
        if self._contradictions[figure] == 1:
            logger.warning(
                "an engine contradicts itself in %r: the answer is recorded as not exact "
                "(further ones are only counted)",
                figure,
            )

    def aborted(self, outcome: str) -> None:
        """An engine aborted a generation by itself: ``tried_again``, ``resumed``, ``completed`` as it
        was, or ``passed_on`` to the client."""
        self._aborts[outcome] += 1

    def answered(self, reason: str | None) -> None:
        """Tokens were retrieved; ``reason`` is why they are not exact."""
        self._answers[reason or "exact"] += 1

    def as_dict(self) -> dict[str, Any]:
        """All counters, ready for JSON."""
        turns, hits = self._turns.total(), self._hits.total()
        return {
            "requests": turns,
            "hits": hits,
            "misses": turns - hits,
            "hit_rate": hits / turns if turns else 0.0,
            "per_turn": {
                str(number): {
                    "requests": count,
                    "hits": self._hits[number],
                    "hit_rate": self._hits[number] / count,
                }
                for number, count in sorted(self._turns.items())
            },
            "tokens_reused": self.tokens_reused,
            "tokens_encoded": self.tokens_encoded,
            "untouched": dict(self._untouched),
            "unrecorded": dict(self._unrecorded),
            "contradictions": dict(self._contradictions),
            "aborts": dict(self._aborts),
            "retrieved": self._answers.total(),
            "inexact": {reason: count for reason, count in self._answers.items() if reason != "exact"},
        }
