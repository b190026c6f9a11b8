"""A session as a tree of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_radix_cache.contracts import Turn

__all__ = ["COMPLETED", "committed", "leaves", "status_of"]

COMPLETED = "completed"
_STATUS = {"stop": COMPLETED, "length": "truncated", "abort": "aborted"}


def status_of(turn: Turn) -> str:
    """Return miles' status of a committed ``turn``. A turn without a finish reason was continued, so completed."""
    reason = turn.finish_reason
    return _STATUS.get(str(reason.get("type")), "aborted") if reason is not None else COMPLETED


def committed(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that sampled a token, and that have ended or were continued by the session."""
    continued = {turn.before for turn in turns}
    return [
        turn for turn in turns if turn.tokens and (turn.finish_reason is not None or turn.number in continued)
    ]


def leaves(turns: Sequence[Turn], *, retries: bool) -> list[Turn]:
    """Return the turns that no other turn continues.

    Without ``retries``, of several turns that continue one turn, all but the latest are left out. This is miles' rule.
    It keeps every turn that begins a conversation (``before`` is None). Here such a turn is left out too if it was
    aborted and its prompt came again later.
    """
    continued = {turn.before for turn in turns}
    latest = {turn.before: turn.number for turn in turns}
    asked_last = {turn.prompt: turn.number for turn in turns}

    def was_tried_again(turn: Turn) -> bool:
        if turn.before is not None:
            return latest[turn.before] != turn.number
        return status_of(turn) == "aborted" and asked_last[turn.prompt] != turn.number

    return [turn for turn in turns if turn.number not in continued and (retries or not was_tried_again(turn))]
