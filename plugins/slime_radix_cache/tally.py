"""Counters of the cache; each kind of failure is logged once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from slime_sglang.request_fields import is_sampling_parameter

__all__ = ["Tally"]

logger = logging.getLogger(__name__)

#: Maximum number of unknown fields that are logged. Clients choose the names, so there may be any number of them.
_MOST_FIELDS = 16


class Tally:
    """Counters behind ``get_stats()``.

    A *turn* is a prompt that is sent as tokens. It is a *hit* if some of its tokens were known. The number of a
    turn is one more than the number of responses before it in its context.
    """

    def __init__(self) -> None:
        self.tokens_reused = 0
        self.tokens_encoded = 0
        self.tokens_given = 0
        self.tokens_sampled = 0
        self._turns: Counter[int] = Counter()
        self._hits: Counter[int] = Counter()
        self.untouched_by_reason: Counter[str] = Counter()
        self.unrecorded_by_kind: Counter[str] = Counter()
        self.contradictions: Counter[str] = Counter()
        self._unknown_fields: set[str] = set()
        #: Sequences by the path of the client's request, and by the kind of the reason why their tokens are not exact
        #: ("exact" if they are).
        self.generated: Counter[tuple[str, str]] = Counter()
        self.answers: Counter[str] = Counter()
        self.aborts: Counter[str] = Counter()

    def turn(self, number: int, reused: int, encoded: int, given: int) -> None:
        """Count a prompt with ``reused`` known tokens, ``encoded`` tokenised ones, and ``given`` ids of the client."""
        self._turns[number] += 1
        self._hits[number] += reused > 0
        self.tokens_reused += reused
        self.tokens_encoded += encoded
        self.tokens_given += given

    @property
    def tokens_prompted(self) -> int:
        """The number of tokens of all prompts."""
        return self.tokens_reused + self.tokens_encoded + self.tokens_given

    def sampled(self, tokens: int) -> None:
        """Count ``tokens`` of an answer that are recorded for the first time."""
        self.tokens_sampled += tokens

    @property
    def prompts(self) -> int:
        """The number of prompts that were sent as tokens."""
        return self._turns.total()

    @property
    def hits(self) -> int:
        """The number of prompts with some known tokens."""
        return self._hits.total()

    def untouched(self, reason: str) -> None:
        """Count a generation request that was passed on untouched. ``reason``: why, or the request's path."""
        self.untouched_by_reason[reason] += 1

    def unrecorded(self, kind: str, error: Exception | None = None, worker: str | None = None) -> None:
        """Count a failure to record, and log the first of each ``kind``.

        A ValueError means that ``worker`` sent something wrong. Any other error is logged with its traceback.
        """
        self.unrecorded_by_kind[kind] += 1
        if self.unrecorded_by_kind[kind] > 1:
            return
        is_explained = isinstance(error, ValueError)
        logger.warning(
            "not recorded: %s%s%s (further failures of this kind are only counted)",
            kind,
            f", by worker {worker}" if worker is not None else "",
            f": {error}" if is_explained else "",
            exc_info=None if is_explained else error,
        )

    def contradicted(self, figure: str) -> None:
        """Count an answer that contradicts itself or its request in ``figure``; log the first for each figure.

        ``figure``: the name of a field, or ``attempt`` if events of the answer, or attempts to get it, contradict one
        another.
        """
        self.contradictions[figure] += 1
        if self.contradictions[figure] == 1:
            logger.warning(
                "an engine contradicts itself in %r: the answer is recorded as not exact "
                "(further such answers are only counted)",
                figure,
            )

    def aborted(self, outcome: str) -> None:
        """Count an abort by an engine.

        ``outcome``: ``tried_again``, ``resumed``, ``completed`` (the answer was whole already), or ``passed_on`` to
        the client.
        """
        self.aborts[outcome] += 1

    def generation(self, path: str, reasons: Iterable[str | None]) -> None:
        """Count the sequences of a generation, which a client requested at ``path``.

        ``reasons``: for each sequence, why its tokens are not exact; None if they are exact.
        """
        for reason in reasons:
            kind, _, field = (reason or "exact").partition(":")
            self.generated[path, kind] += 1
            if field and field not in self._unknown_fields:
                self._unknown_field(field)

    def _unknown_field(self, name: str) -> None:
        if len(self._unknown_fields) < _MOST_FIELDS:
            self._unknown_fields.add(name)
            cure = "; engines ignore it outside of sampling_params" if is_sampling_parameter(name) else ""
            logger.warning(
                "a request has the unknown field %r: the answer is recorded as not exact "
                "(further requests with it are only counted)%s",
                name,
                cure,
            )

    def answered(self, reason: str | None) -> None:
        """Count a retrieved answer. ``reason``: why its tokens are not exact; None if they are exact."""
        self.answers[reason or "exact"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return all counters, ready for JSON."""
        turns, hits = self.prompts, self.hits
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
            "tokens_given": self.tokens_given,
            "untouched": dict(self.untouched_by_reason),
            "unrecorded": dict(self.unrecorded_by_kind),
            "contradictions": dict(self.contradictions),
            "aborts": dict(self.aborts),
            "retrieved": self.answers.total(),
            "inexact": {reason: count for reason, count in self.answers.items() if reason != "exact"},
        }
