"""Whole answers in place of aborted answers, without streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router_core.reply import Reply
from slime_resume.generation import Generation
from slime_resume.response_merger import MergedResponse
from slime_sglang import is_aborted, read_event, sampled_ids
from slime_sglang.bodies import parsed
from slime_sglang.token_arrays import dumped

__all__ = ["resume_answer"]


async def resume_answer(
    generation: Generation,
    aborted: dict[str, Any],
    record: Callable[[dict[str, Any], str | None], None],
    fail: Callable[[ValueError], None],
) -> bytes | None:
    """Return, as JSON, the answer that replaces ``aborted``, or None if the client should get ``aborted`` itself.

    ``record`` gets each aborted answer that has tokens, and then the last answer. The second argument of ``record`` is
    the reason why the answer's token ids cannot be trusted, or None. ``fail`` is called for each further attempt whose
    answer is not understood.
    """
    merged: MergedResponse | None = None
    latest, body, doubt = aborted, None, None
    recorded: dict[str, Any] | None = None

    def keep() -> None:
        nonlocal recorded
        if recorded is not latest:
            record(latest, doubt)
            recorded = latest

    def take(answer: dict[str, Any], whole: bytes | None) -> bool:
        """Take an answer. Return True when it brings the response further.

        If ``generation.goes_on``, the answers are merged, beginning with the first aborted answer that has tokens.
        """
        nonlocal merged, latest, body, doubt
        if merged is None:
            has_tokens = bool(sampled_ids(answer))
            latest, body = answer, whole
            if not is_aborted(answer) or not has_tokens:
                return not is_aborted(answer)
            if not generation.goes_on:
                keep()
                return False
            merged = generation.merge(answer)
            doubt = merged.doubt()
            if not merged.ended:
                return True
        else:
            merged.take(answer)
        latest, doubt = merged.answer(), merged.doubt()
        body = dumped(latest)
        return merged.has_grown

    async def attempt(reply: Reply) -> bool:
        try:
            whole = await reply.read()
        finally:
            generation.give_back(reply)
        try:
            return take(read_event(parsed(whole, keeps_arrays=True)), whole)
        except ValueError as error:
            fail(error)
            return False

    take(aborted, None)
    while is_aborted(latest):
        if sampled_ids(latest):
            keep()
        if not await generation.resume(latest, merged, attempt):
            break
    keep()
    return body
