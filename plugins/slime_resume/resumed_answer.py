"""Whole answers in place of aborted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from router_core.reply import Reply
from slime_resume.generation import Generation
from slime_sglang import is_aborted, read_event, sampled_ids
from slime_sglang.bodies import parsed

__all__ = ["resume_answer"]


async def resume_answer(
    generation: Generation, aborted: dict[str, Any], record: Callable[[dict[str, Any], str | None], None]
) -> bytes | None:
    """Return the answer to give instead of ``aborted``, as JSON; None when there is none.

    ``record`` gets each aborted answer that has tokens, since they are a fact, and then the last answer; with each a
    reason why it is no evidence, None if it may be.
    """
    merged = generation.merge(aborted) if generation.goes_on else None
    doubt = merged.doubt() if merged is not None else None
    latest, body = aborted, None
    recorded: dict[str, Any] | None = None

    def keep() -> None:
        nonlocal recorded
        if recorded is not latest:
            record(latest, doubt)
            recorded = latest

    async def attempt(reply: Reply) -> bool:
        nonlocal latest, body, doubt
        try:
            whole = await reply.read()
        finally:
            generation.rest(reply)
        try:
            answer = read_event(parsed(whole))
            has_tokens = bool(sampled_ids(answer))
            if merged is not None:
                merged.take(answer)
        except ValueError as error:
            generation.tally.unrecorded("answer_not_understood", error)
            return False
        if merged is not None:
            latest, doubt = merged.answer(), merged.doubt()
            body = orjson.dumps(latest)
            return merged.has_grown
        latest, body = answer, whole
        if is_aborted(answer) and has_tokens:
            keep()
        return not is_aborted(answer)

    if merged is not None and merged.ended:
        latest = merged.answer()
        body = orjson.dumps(latest)
    while is_aborted(latest):
        if sampled_ids(latest):
            keep()
        if not await generation.resume(latest, merged, attempt):
            break
    keep()
    return body
