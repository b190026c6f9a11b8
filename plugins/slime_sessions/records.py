"""A session's turns in the shape of miles' records (miles/rollout/session/types.py at 31f1ca961)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_sessions.tree import committed, statuses_of

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionTurns, Turn

__all__ = ["accumulated", "records_of"]

_PROMPT = -1


def records_of(source: SessionTurns, turns: Sequence[Turn], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record of each turn. O(tokens of all contexts); any thread may call this.

    ``texts``: the text that the client got in each of ``turns``. In a record, ``request.input_ids`` has all tokens
    before the response. It is a numpy array, which is smaller than a list: the records repeat many tokens.
    ``output_token_logprobs`` has ``[logprob, id, null]`` for each token of the response. The messages of requests, and
    times, are not kept. ``timestamp`` is 0, since miles requires a number.
    """
    statuses = statuses_of(turns)
    return [
        {**_record(source, turn, turns, text), "status": statuses.get(turn.number)}
        for turn, text in zip(turns, texts, strict=True)
    ]


def _record(source: SessionTurns, turn: Turn, turns: Sequence[Turn], text: str) -> dict[str, Any]:
    context = source.context(turn, turns)
    tokens = context.record.tokens
    asked = len(tokens) - turn.tokens
    logprobs = context.record.logprobs[asked:].tolist()
    versions = [version for version, count in context.record.spans if count and version != _PROMPT]
    meta: dict[str, Any] = {
        "prompt_tokens": asked,
        "completion_tokens": turn.tokens,
        "finish_reason": turn.finish_reason,
        "output_token_logprobs": [
            [logprob if logprob == logprob else None, token, None]  # NaN: the engine gave none
            for logprob, token in zip(logprobs, tokens[asked:].tolist(), strict=True)
        ],
    }
    if versions and versions[-1] is not None:
        meta["weight_version"] = versions[-1]
    finish = turn.finish_reason.get("type") if turn.finish_reason is not None else None
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
        "meta_info": meta,
    }
    return {
        "timestamp": 0.0,
        "request_timestamp": None,
        "method": "POST",
        "path": "/generate",
        "status_code": 200,
        "request": {"input_ids": tokens[:asked]},
        "response": {"choices": [choice]},
        "number": turn.number,
        "parent": turn.before,
        "exact": context.inexact_reason is None,
        "inexact_reason": context.inexact_reason,
    }


def accumulated(source: SessionTurns, turns: Sequence[Turn]) -> Any:
    """Return the tokens up to the end of the last committed turn, as an array; ``[]`` without such a turn."""
    found = committed(turns, statuses_of(turns))
    return source.context(found[-1], turns).record.tokens if found else []
