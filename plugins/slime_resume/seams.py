"""Text of a response that was sampled in several goes: no seam shows where one ended and the next began.

An engine that continues from tokens knows them as a prompt. It cannot finish a character that they left
half done, nor see a stop string that they began. Both are made good here, by decoding across the seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_core.types import Tokenizer
from slime_resume.stop_conditions import stop_strings

__all__ = ["SeamlessText", "StopAcross"]

_BROKEN = "\ufffd"
#: Tokens decoded together with new ones, so that these are read as they are in their place.
_WINDOW = 16


class SeamlessText:
    """The text of a growing response of which an engine has spelt the beginning, by the engine's rules.

    ``ids`` are its tokens so far, ``text`` is what the engine gave for them. The engine may have withheld the end,
    which could have become a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, parameters: dict[str, Any], ids: Sequence[int], text: str
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = parameters.get("skip_special_tokens") is not False
        self._trims = not parameters.get("no_stop_trim")
        self._stops = stop_strings(parameters)
        self._ids = list(ids)
        self._start = max(0, len(self._ids) - _WINDOW)
        window = self._decode(self._start)
        self._window = window.rstrip(_BROKEN)
        broken = min(len(window) - len(self._window), len(text) - len(text.rstrip(_BROKEN)))
        self._text = text[: len(text) - broken]
        self._text += self._withheld()
        self._seam = len(self._text)

    def _withheld(self) -> str:
        """Text of the last tokens that the engine has not shown."""
        # Behind a start its first token may end a character, whose beginning is not decoded with it.
        window = self._window.lstrip(_BROKEN) if self._start else self._window
        told = next((size for size in range(len(window), 0, -1) if self._text.endswith(window[:size])), 0)
        return window[told:] if told or not (self._start or self._text) else ""

    def add(self, ids: Sequence[int], reason: dict[str, Any] | None) -> str:
        """All that is to be seen after ``ids``; with ``reason`` they are the last ones. O(new tokens).

        As long as it goes on, half a character and what may become a stop string are held back.
        """
        matched = reason.get("matched") if reason is not None and self._trims else None
        self._ids += ids[:-1] if isinstance(matched, int) else ids
        whole = self._decode(self._start)
        self._grow(whole if reason is not None else whole.rstrip(_BROKEN))
        if isinstance(matched, str):
            place = self._text.find(matched, max(0, self._seam - len(matched) + 1))
            return self._text if place < 0 else self._text[:place]
        return self._text if reason is not None else self._text[: len(self._text) - self._held()]

    def _grow(self, window: str) -> None:
        if len(window) > len(self._window):
            self._text += window[len(self._window) :]
            self._window = window
        if len(self._ids) - self._start > 4 * _WINDOW:
            start = len(self._ids) - _WINDOW
            rest = self._decode(start)
            if not rest.endswith(_BROKEN):
                self._start, self._window = start, rest

    def _held(self) -> int:
        """Characters at the end with which a stop string may begin."""
        return max((_overlap(self._text, stop) for stop in self._stops), default=0) if self._trims else 0

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class StopAcross:
    """Looks for a stop string that begins in ``ids`` and ends in the tokens that come after them."""

    def __init__(self, tokenizer: Tokenizer, parameters: dict[str, Any], ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stop_strings(parameters)
        self._reach = max((len(stop) for stop in self._stops), default=0) - 1
        self._ids = list(ids[-4 * self._reach :]) if self._reach > 0 else []
        self._before = len(self._decode().rstrip(_BROKEN)) if self._ids else 0

    def find(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Return the number of next ``ids`` that complete a stop string, and that string; None when none does."""
        if not self._ids:
            return None
        for count, token in enumerate(ids, 1):
            self._ids.append(token)
            text = self._decode()
            for stop in self._stops:
                place = text.find(stop, max(0, self._before - len(stop) + 1))
                if 0 <= place < self._before:
                    return count, stop
            if len(text.rstrip(_BROKEN)) >= self._before + self._reach:
                self._ids = []  # too far behind the seam for any
                return None
        return None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)
