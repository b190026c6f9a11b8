"""A session as a tree of turns."""

from __future__ import annotations

from collections.abc import Sequence

from slime_sessions.turns import Turn

__all__ = ["committed", "leaves"]


def committed(turns: Sequence[Turn]) -> list[Turn]:
    """The turns that sampled something and have ended, or that the session went on from."""
    continued = {turn.before for turn in turns}
    return [
        turn for turn in turns if turn.tokens and (turn.finish_reason is not None or turn.number in continued)
    ]


def leaves(turns: Sequence[Turn], *, retries: bool) -> list[Turn]:
    """The turns of the tree that nothing goes on from.

    Without ``retries`` not those that were tried again: a later turn goes on from where they do.
    """
    continued = {turn.before for turn in turns}
    latest = {turn.before: turn.number for turn in turns}
    return [
        turn
        for turn in turns
        if turn.number not in continued
        and (retries or turn.before is None or latest[turn.before] == turn.number)
    ]
