"""A session as a tree of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_radix_cache.contracts import Turn

__all__ = ["ABORTED", "COMPLETED", "committed", "leaves", "statuses_of"]

COMPLETED, ABORTED = "completed", "aborted"
_STATUS = {"stop": COMPLETED, "length": "truncated", "abort": ABORTED}


def statuses_of(turns: Sequence[Turn]) -> dict[int, str]:
    """Return miles' status of each turn by its number. ``turns``: all turns of a session.

    A turn without a finish reason is completed if the session continued it. Otherwise the turn has no status while it
    runs, and is aborted once it has ended, since the worker or the client broke it off.
    """
    continued = {turn.before for turn in turns}
    found = {}
    for turn in turns:
        if turn.finish_reason is not None:
            found[turn.number] = _STATUS.get(str(turn.finish_reason.get("type")), ABORTED)
        elif turn.number in continued:
            found[turn.number] = COMPLETED
        elif not turn.is_running:
            found[turn.number] = ABORTED
    return found


def committed(turns: Sequence[Turn], statuses: Mapping[int, str]) -> list[Turn]:
    """Return the turns that sampled a token, and that have ended or were continued by the session."""
    return [turn for turn in turns if turn.tokens and turn.number in statuses]


def leaves(turns: Sequence[Turn], statuses: Mapping[int, str], *, retries: bool) -> list[Turn]:
    """Return the committed turns that no other committed turn continues.

    Without ``retries``, of several turns that continue one turn, all but the latest are left out. This is miles' rule,
    which keeps every turn that begins a conversation (``before`` is None). Here such a turn is left out, too, if it was
    aborted and its prompt came again later.
    """
    turns = committed(turns, statuses)
    continued = {turn.before for turn in turns}
    latest = {turn.before: turn.number for turn in turns}
    asked_last = {turn.prompt: turn.number for turn in turns}

    def was_tried_again(turn: Turn) -> bool:
        if turn.before is not None:
            return latest[turn.before] != turn.number
        return statuses[turn.number] == ABORTED and asked_last[turn.prompt] != turn.number

    return [turn for turn in turns if turn.number not in continued and (retries or not was_tried_again(turn))]
