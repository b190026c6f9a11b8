"""Search for marks (stop strings and tags) in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["find", "held"]


def find(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the index of the mark that ends first in ``text``, and the mark itself; None if there is no mark.

    The ends are compared, not the beginnings, so that reading character by character finds the same mark.
    """
    best: tuple[int, int, str] | None = None
    for mark in marks:
        at = text.find(mark, start)
        if at >= 0 and (best is None or (at + len(mark), at) < best[:2]):
            best = (at + len(mark), at, mark)
    return best and best[1:]


def held(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest suffix of ``text`` that may begin a mark."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(start, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
