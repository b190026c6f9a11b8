"""Special tokens that texts spell. No other token begins or ends inside one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["SpecialTokens", "any_of"]


class SpecialTokens:
    """Search for the special tokens ``texts`` in UTF-8 texts.

    No special token may begin at the second or a later character of another one.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        spelt = sorted(set(texts))
        self._spelt = re.compile(any_of(spelt).encode()) if spelt else None
        self._reach = max((len(text.encode()) for text in spelt), default=1) - 1

    def around(self, text: bytes, position: int) -> int | None:
        """Return the start of the special token around ``position``; None if no such token is there. O(1)."""
        if self._spelt is None:
            return None
        nearby = max(0, position - self._reach), position + self._reach
        for found in self._spelt.finditer(text, *nearby):
            if found.end() > position:
                return found.start() if found.start() < position else None
        return None


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that finds any of ``texts``. It reads each character once, not once per text.

    If one text is a prefix of another, the expression finds the shorter text.
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        branches.setdefault(text[0], []).append(text[1:])
    found = [re.escape(char) + any_of(rests) for char, rests in branches.items()]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
