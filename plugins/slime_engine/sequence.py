"""A running generation, and the deltas that bring it to the client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime_engine.backend import Run
from slime_engine.grammars import Bound
from slime_engine.journal import JournalEntry
from slime_engine.requests import GenerateRequest

__all__ = ["FinishReason", "ScoredToken", "Sequence", "TextDelta", "TokenDelta"]

FinishReason = dict[str, Any]
#: ``(logprob, token id)``; the first scored token of a prompt has no logprob.
ScoredToken = tuple[float | None, int]


class Sequence:
    """The scheduler's state of one request. ``due_at``: the time of its next token on the scheduler's clock.

    ``bound``: the grammar state of the answer, or None without a grammar. ``script``: the tokens of the answer, if it
    is scripted.
    """

    def __init__(
        self,
        request: GenerateRequest,
        input_ids: list[int],
        *,
        max_new_tokens: int,
        seed: int,
        entry: JournalEntry,
        due_at: float,
        bound: Bound | None = None,
        script: list[int] | None = None,
    ) -> None:
        self.request = request
        self.rid = request.rid
        self.params = request.params
        self.input_ids = input_ids
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.entry = entry
        self.due_at = due_at
        self.bound = bound
        self.script = script or []
        self.context = list(input_ids)
        self.counts: Counter[int] = Counter()
        self.stops = [(text, text.encode()) for text in request.params.stop]
        self.tail = b""  # the last bytes of the output, as many as a stop string may need
        self.input_logprobs: list[ScoredToken] = []
        self.input_tops: list[list[ScoredToken] | None] = []
        self.unsent_logprobs: list[float] = []
        self.unsent_tops: list[list[ScoredToken]] = []
        self.sent = 0
        self.started = False
        self.run: Run | None = None  # the backend's state, set by Steps.begin; still set after its release
        self.retractions = 0
        self.expected = False  # the first token comes from a prefill engine, and has not arrived
        self.given = False  # the prefill engine's token has arrived, but was not checked for a stop yet
        self.taken_for: str | None = None  # this engine's weight version when the prefill token arrived
        self.cached_before: int | None = None  # prompt tokens that the prefill engine had in its cache

    @property
    def completion_tokens(self) -> int:
        return len(self.context) - len(self.input_ids)

    @property
    def rank(self) -> int:
        return self.entry.dp_rank

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from a cache. As in SGLang, a decode engine reports the number of the prefill engine."""
        if self.cached_before is not None:
            return self.cached_before
        return 0 if self.run is None else self.run.cached_tokens

    @property
    def scripted(self) -> int | None:
        """The script's next token, if any is left."""
        done = self.completion_tokens
        return self.script[done] if done < len(self.script) else None

    def _spans(self) -> list[tuple[str, int, int]]:
        """Return the spans ``(version, start, end)`` to report: a prefill engine's token has version ``taken_for``."""
        spans = self.entry.spans()
        if self.taken_for is None or not spans:
            return spans
        (version, _, end), *later = spans
        later = [(version, 1, end), *later] if end > 1 else later
        if later and later[0][0] == self.taken_for:
            return [(self.taken_for, 0, later[0][2]), *later[1:]]
        return [(self.taken_for, 0, 1), *later]

    def delta(self, reason: FinishReason | None, version: str) -> TokenDelta:
        """Return everything new since the previous delta. The final delta alone has a ``reason``, which is journaled.

        ``version``: the weight version that a delta reports if the sequence has no output tokens.
        """
        if reason is not None:
            self.entry.finish_reason = reason
        done = self.completion_tokens
        spans = self._spans()
        delta = TokenDelta(
            sequence=self,
            token_ids=self.context[len(self.input_ids) + self.sent :],
            logprobs=self.unsent_logprobs,
            tops=self.unsent_tops,
            completion_tokens=done,
            spans=spans,
            weight_version=spans[-1][0] if spans else version,
            finish_reason=reason,
        )
        self.sent, self.unsent_logprobs, self.unsent_tops = done, [], []
        return delta


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens sampled since the sequence's previous delta.

    ``completion_tokens`` and ``spans`` are those of the sequence's whole output up to the end of this delta.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]
    tops: list[list[ScoredToken]]
    completion_tokens: int
    spans: list[tuple[str, int, int]]
    weight_version: str
    finish_reason: FinishReason | None


class TextDelta(NamedTuple):
    """A delta with the text that it adds; text may lag behind the tokens."""

    tokens: TokenDelta
    text: str
