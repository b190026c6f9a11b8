"""SGLang's JSON outputs of one sequence, made from its deltas."""

from __future__ import annotations

from typing import Any

import anyio

from slime_engine.language import ModelTokenizer
from slime_engine.requests import GenerateRequest
from slime_engine.sequence import ScoredToken, Sequence, TextDelta

__all__ = ["Reply"]

JSONDict = dict[str, Any]
#: ``[logprob, token id, text or null]``
LogprobTuple = list[Any]


class Reply:
    """The outputs of one sequence.

    With ``incremental`` each output has only new text, and the ids and logprobs of new output tokens. The counters in
    ``meta_info`` are totals even then. Without ``incremental`` each output has everything so far.
    """

    def __init__(self, request: GenerateRequest, tokenizer: ModelTokenizer, *, incremental: bool) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._incremental = incremental
        self._began = anyio.current_time()
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[LogprobTuple] = []
        self._tops: list[list[LogprobTuple]] = []
        self._completion_tokens = 0

    def add(self, deltas: list[TextDelta]) -> JSONDict:
        """Return the output after ``deltas``, one or more deltas of this sequence."""
        if self._incremental:
            self._text, self._ids, self._logprobs, self._tops = [], [], [], []
        for tokens, text in deltas:
            self._text.append(text)
            self._ids += tokens.token_ids
            if self._request.return_logprob:
                scored = zip(tokens.logprobs, tokens.token_ids, strict=True)
                self._logprobs += [self._tuple(one) for one in scored]
                self._tops += [[self._tuple(one) for one in top] for top in tokens.tops]
        output: JSONDict = {
            "text": "".join(self._text),
            "output_ids": self._ids if self._incremental else self._ids.copy(),
            "meta_info": self._meta_info(deltas[-1]),
        }
        if self._request.return_prompt_token_ids:
            output["prompt_token_ids"] = deltas[-1].tokens.sequence.input_ids
        return output

    def _tuple(self, scored: ScoredToken) -> LogprobTuple:
        logprob, token_id = scored
        text = self._tokenizer.decode([token_id]) if self._request.return_text_in_logprobs else None
        return [logprob, token_id, text]

    def _meta_info(self, delta: TextDelta) -> JSONDict:
        tokens = delta.tokens
        sequence = tokens.sequence
        meta: JSONDict = {"id": sequence.rid, "finish_reason": tokens.finish_reason}
        if sequence.started:
            meta["prompt_tokens"] = len(sequence.input_ids)
        meta["weight_version"] = tokens.weight_version
        meta["completion_tokens"] = tokens.completion_tokens
        if sequence.started:
            meta |= {
                "cached_tokens": sequence.cached_tokens,
                "num_retractions": sequence.retractions,
                "dp_rank": sequence.entry.dp_rank,
            }
            if len(tokens.spans) > 1:
                meta["weight_versions"] = [
                    {"version": version, "start": start, "end": end} for version, start, end in tokens.spans
                ]
            if self._request.return_logprob:
                meta |= self._logprob_info(sequence, tokens.completion_tokens)
        if tokens.finish_reason is not None:
            meta["e2e_latency"] = anyio.current_time() - self._began
        return meta

    def _logprob_info(self, sequence: Sequence, completion_tokens: int) -> JSONDict:
        info: JSONDict = {
            "input_token_logprobs": [self._tuple(one) for one in sequence.input_logprobs],
            "output_token_logprobs": self._logprobs.copy(),
            "output_token_logprobs_length": completion_tokens,
        }
        if self._request.top_logprobs_num:
            info["input_top_logprobs"] = [
                top if top is None else [self._tuple(one) for one in top] for top in sequence.input_tops
            ]
            info["output_top_logprobs"] = self._tops.copy()
        return info
