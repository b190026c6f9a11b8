"""Model steps of one sequence: score its prompt, sample its next token, check whether it is finished."""

from __future__ import annotations

import numpy as np

from slime_engine.grammars import BoolArray
from slime_engine.language import FloatArray, LanguageModel
from slime_engine.model import log_softmax
from slime_engine.sampling import choose, uniform
from slime_engine.sequence import FinishReason, ScoredToken, Sequence

__all__ = ["Steps"]

#: Prompt tokens scored at once; each costs about as much as a sampled one.
_PREFILL_CHUNK = 64
#: An answer under a grammar closes what is open after this many tokens, or half of ``max_new_tokens`` if fewer.
_CLOSING_FROM = 64


class Steps:
    """Steps of one model. Each method is short, so that the caller can do other work between calls."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def score_prompt(self, sequence: Sequence, version: str) -> bool:
        """Score the next tokens of the prompt, from ``logprob_start_len`` on. Return True while more are left.

        The log-probabilities are those at temperature 1, whatever the request's temperature, as in SGLang.
        """
        request, ids = sequence.request, sequence.input_ids
        start = request.logprob_start_len
        if not request.return_logprob or start < 0:
            return False
        position = start + len(sequence.input_logprobs)
        for here in range(position, min(position + _PREFILL_CHUNK, len(ids))):
            logprobs = log_softmax(self._model.next_logits(ids, version, here))
            first = here == start  # SGLang has no logits before the first token that it scores
            sequence.input_logprobs.append((None if first else float(logprobs[ids[here]]), ids[here]))
            sequence.input_tops.append(None if first else _top(logprobs, request.top_logprobs_num))
        return position + _PREFILL_CHUNK < len(ids)

    def sample(self, sequence: Sequence, version: str) -> None:
        """Sample one token, and append it. A scripted token also has the model's log-probability."""
        params, context = sequence.params, sequence.context
        allowed = _allowed(sequence)
        forbidden: frozenset[int] = frozenset()
        if sequence.completion_tokens < params.min_new_tokens:
            stops = self._model.tokenizer.eos_ids | params.stop_token_ids
            forbidden = frozenset(one for one in stops if 0 <= one < self._model.vocab_size)
            if allowed is not None and not np.delete(allowed, list(forbidden)).any():
                forbidden = frozenset()  # the grammar has nothing else left
        logits = self._model.next_logits(context, version)
        luck = uniform(sequence.seed, len(context))
        token_id, logprobs = choose(logits, params, sequence.counts, forbidden, luck, allowed)
        scripted = sequence.scripted
        if scripted is not None and logprobs[scripted] > -np.inf:
            token_id = scripted
        else:  # no scripted token is left, or min_new_tokens forbids it: the model continues
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
        stop_ids = self._model.tokenizer.eos_ids | params.stop_token_ids
        if last in stop_ids and (not params.ignore_eos or sequence.bound is not None):
            return {"type": "stop", "matched": last}
        if sequence.stops:
            text = sequence.tail + self._model.tokenizer.token_bytes[last]
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
