"""Model steps of one sequence: the logits that it needs next, and the scores and tokens made from these logits."""

from __future__ import annotations

import numpy as np

from slime_engine.backend import Backend, Query
from slime_engine.grammars import BoolArray
from slime_engine.language import FloatArray
from slime_engine.model import log_softmax
from slime_engine.sampling import choose, uniform
from slime_engine.sequence import FinishReason, ScoredToken, Sequence

__all__ = ["Steps"]

#: The largest number of prompt tokens scored in one step. Each costs about as much as a sampled token.
_PREFILL_CHUNK = 64
#: After this many tokens, or after half of ``max_new_tokens`` if that is less, an answer under a grammar begins to
#: close its brackets and quotes, unless its next token is scripted.
_CLOSING_FROM = 64


class Steps:
    """Steps of the sequences of one backend. Each method takes little time, so that other tasks can run between calls.

    ``scores_prompts``: compute the log-probabilities of the prompt for requests that ask for them.
    """

    def __init__(self, backend: Backend, *, scores_prompts: bool) -> None:
        self._backend = backend
        self._scores_prompts = scores_prompts

    def begin(self, sequence: Sequence) -> None:
        """Begin ``sequence`` in the backend. As in SGLang, the first scored prompt token has no log-probability."""
        sequence.run = self._backend.begin(sequence.rank)
        start = self._score_from(sequence)
        if start is not None and start < len(sequence.input_ids):
            sequence.input_logprobs.append((None, sequence.input_ids[start]))
            sequence.input_tops.append(None)

    def release(self, sequence: Sequence) -> None:
        if sequence.run is not None:
            self._backend.release(sequence.run)

    def query(self, sequence: Sequence) -> Query | None:
        """Return the query for the sequence's next step, or None if it needs no logits."""
        assert sequence.run is not None  # narrowing: the scheduler has begun it
        places = self._unscored(sequence)
        if places:
            return Query(sequence.run, sequence.input_ids, places.stop - 1, len(places))
        # Routed experts need a pass over the prompt even when no token is sampled.
        samples = sequence.max_new_tokens > 0 and not sequence.given
        if not (samples or sequence.request.return_routed_experts):
            return None
        return Query(sequence.run, sequence.context, len(sequence.context))

    def score_prompt(self, sequence: Sequence, rows: FloatArray) -> bool:
        """Score the next tokens of the prompt, from ``logprob_start_len`` on. Return False if none is left.

        The log-probabilities are those at temperature 1, whatever the request's temperature, as in SGLang.
        """
        places = self._unscored(sequence)
        for place, row in zip(places, rows, strict=False):
            logprobs, token_id = log_softmax(row), sequence.input_ids[place]
            sequence.input_logprobs.append((float(logprobs[token_id]), token_id))
            sequence.input_tops.append(_top(logprobs, sequence.request.top_logprobs_num))
        return bool(places)

    def _score_from(self, sequence: Sequence) -> int | None:
        request = sequence.request
        scores = self._scores_prompts and request.return_logprob and request.logprob_start_len >= 0
        return request.logprob_start_len if scores else None

    def _unscored(self, sequence: Sequence) -> range:
        """Return the places of the prompt's tokens to score next: an empty range when none is left to score."""
        start = self._score_from(sequence)
        if start is None:
            return range(0)
        place = start + len(sequence.input_logprobs)
        return range(place, min(place + _PREFILL_CHUNK, len(sequence.input_ids)))

    def sample(self, sequence: Sequence, logits: FloatArray, version: str) -> None:
        """Sample one token from ``logits``, and append it. A scripted token gets the model's log-probability."""
        params, context = sequence.params, sequence.context
        allowed = _allowed(sequence)
        forbidden: frozenset[int] = frozenset()
        if sequence.completion_tokens < params.min_new_tokens:
            stops = self._backend.tokenizer.eos_ids | params.stop_token_ids
            forbidden = frozenset(one for one in stops if 0 <= one < self._backend.vocab_size)
            if allowed is not None and not np.delete(allowed, list(forbidden)).any():
                forbidden = frozenset()  # the grammar allows no other tokens
        luck = uniform(sequence.seed, len(context))
        token_id, logprobs = choose(logits, params, sequence.counts, forbidden, luck, allowed)
        scripted = sequence.scripted
        if scripted is not None and logprobs[scripted] > -np.inf:
            token_id = scripted
        else:  # no scripted token is left, or the next one is forbidden: the model continues
            sequence.script = []
        logprob = float(logprobs[token_id])
        self.give(sequence, token_id, logprob, _top(logprobs, sequence.request.top_logprobs_num), version)

    def give(
        self, sequence: Sequence, token_id: int, logprob: float, top: list[ScoredToken], version: str
    ) -> None:
        """Append a token, sampled here or by another engine, to the sequence and the journal."""
        sequence.entry.append(token_id, logprob, version)
        sequence.context.append(token_id)
        sequence.unsent_logprobs.append(logprob)
        if sequence.request.top_logprobs_num:
            sequence.unsent_tops.append(top)
        if sequence.params.penalises:
            sequence.counts[token_id] += 1
        if sequence.bound is not None:
            sequence.bound.advance(token_id)

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return the sequence's finish reason, or None. The length is checked before stops, as in SGLang."""
        if sequence.completion_tokens >= sequence.max_new_tokens:
            return {"type": "length", "length": sequence.max_new_tokens}
        params, last = sequence.params, sequence.context[-1]
        stop_ids = self._backend.tokenizer.eos_ids | params.stop_token_ids
        if last in stop_ids and (not params.ignore_eos or sequence.bound is not None):
            return {"type": "stop", "matched": last}
        if sequence.stops:
            text = sequence.tail + self._backend.tokenizer.token_bytes[last]
            for stop, encoded in sequence.stops:
                if encoded in text:
                    return {"type": "stop", "matched": stop}
            sequence.tail = text[-max(len(encoded) for _, encoded in sequence.stops) :]
        return None


def _allowed(sequence: Sequence) -> BoolArray | None:
    if sequence.bound is None:
        return None
    is_long = sequence.completion_tokens >= min(_CLOSING_FROM, sequence.max_new_tokens // 2)
    return sequence.bound.allowed(closing=is_long and sequence.scripted is None)


def _top(logprobs: FloatArray, count: int) -> list[ScoredToken]:
    """Return the ``count`` likeliest tokens, best first."""
    if not count:
        return []
    best = np.argsort(-logprobs, kind="stable")[:count]
    return [(float(logprobs[one]), int(one)) for one in best]
