"""Text of a response that was sampled in several attempts, across the seams between them.

An engine that continues from tokens gets them as a prompt. The engine cannot finish a character, or match a stop
string, that began in these tokens. This module does both, by decoding across the seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_core.types import Tokenizer
from slime_resume.stop_conditions import stop_strings

__all__ = ["SeamlessText", "StopAcross"]

_BROKEN = "\ufffd"
#: Number of earlier tokens decoded together with new tokens: the text of a token depends on the tokens before it.
_WINDOW = 16


class SeamlessText:
    """The text of a growing response, by the engine's rules.

    ``ids`` are its tokens so far, ``text`` is the text that the engine gave for them. The text may lack its end: the
    engine withholds an end that may be the beginning of a stop string.
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
        """Return the end of the tokens' text, which the engine has withheld."""
        # The first token of the window may end a character that began before the window.
        window = self._window.lstrip(_BROKEN) if self._start else self._window
        told = next((size for size in range(len(window), 0, -1) if self._text.endswith(window[:size])), 0)
        return window[told:] if told or not (self._start or self._text) else ""

    def add(self, ids: Sequence[int], reason: dict[str, Any] | None) -> str:
        """Add ``ids``, the next tokens, and return all visible text. Decodes O(new tokens).

        ``reason``: the engine's finish reason, or None if more tokens follow. While more tokens follow, an incomplete
        character at the end is held back, and so is text that may begin a stop string.
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
        """Return the number of characters at the end of the text that may begin a stop string."""
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
        """Return ``(count, stop)`` if the next tokens ``ids`` complete a stop string, or None.

        ``count``: the number of ``ids`` up to the end of ``stop``.
        """
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
                self._ids = []  # no stop string reaches from here back to the seam
                return None
        return None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)
