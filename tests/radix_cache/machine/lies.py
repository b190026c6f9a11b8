"""Lies of a broken engine about its sampled tokens: one figure is wrong, all others are right."""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ["LIES", "NOTHING_LEFT", "can_be_told", "tell"]

#: A lie after which an answer has no tokens at all.
NOTHING_LEFT = "no_tokens"
LIES = (
    "completion_tokens",
    "fewer_logprobs",
    "more_logprobs",
    "other_logprobs",
    "half_the_logprobs",
    "text",
    "cut_text",
    "spans",
    "prompt_tokens",
    "id",
    NOTHING_LEFT,
)
#: Told by each event of a stream, the others by the last one.
_OF_EACH_EVENT = ("prompt_tokens", "id", NOTHING_LEFT)


def can_be_told(lie: str, output: dict[str, Any], *, named: bool) -> bool:
    """True when ``output``, all of an answer, has the figure; ``named``: the request told its name."""
    meta = output["meta_info"]
    size = len(output.get("output_ids") or ())
    if not size:
        return False
    if lie == "id":
        return named
    if lie == "prompt_tokens":
        return "prompt_tokens" in meta
    if lie.endswith("logprobs"):
        return len(meta.get("output_token_logprobs") or ()) == size and size > 1
    if lie == "cut_text":
        text = output["text"].rstrip()
        reason = meta["finish_reason"] or {}  # an answer to a client that leaves has none
        return reason.get("type") == "length" and bool(text) and not text.endswith("\ufffd")
    return True


def tell(lie: str, output: dict[str, Any], luck: Random, *, last: bool) -> None:
    """Change ``output``, which has all of a sequence so far."""
    if not last and lie not in _OF_EACH_EVENT:
        return
    meta = output["meta_info"]
    ids = output["output_ids"]
    logprobs = meta.get("output_token_logprobs")
    if lie == "completion_tokens":
        meta[lie] += 20  # by less it might be that of deltas
    elif lie == "prompt_tokens":
        meta[lie] += 1
    elif lie == "id":
        meta[lie] = "another"
    elif lie == "text":
        output["text"] += "Z"
    elif lie == "cut_text":
        output["text"] = output["text"].rstrip()[:-1]
    elif lie == "spans":
        size = len(ids)
        meta["weight_versions"] = luck.choice(
            (
                [{"version": "1", "start": 0, "end": size + 1}],
                [{"version": "1", "start": 1, "end": size + 1}],
                [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": size + 2}],
            )
        )
    elif lie == "fewer_logprobs":
        meta["output_token_logprobs"] = logprobs[:-1]
    elif lie == "more_logprobs":
        meta["output_token_logprobs"] = [*logprobs, [-0.5, ids[-1] + 1, None]]
    elif lie == "other_logprobs":
        logprob, token, text = logprobs[-1]
        meta["output_token_logprobs"] = [*logprobs[:-1], [logprob, token + 1, text]]
    elif lie == "half_the_logprobs":
        del output["output_ids"]
        meta["output_token_logprobs"] = logprobs[: len(ids) // 2]
    else:
        del output["output_ids"]
        meta.pop("output_token_logprobs", None)
