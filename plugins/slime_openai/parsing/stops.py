"""OpenAI's ``stop``: the text before the first stop string, from text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from slime_openai.parsing.marks import find, held

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text on up to a stop string. Text that may begin a stop string is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        """Return the text, held back or new, that certainly comes before any stop string."""
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        text = self._held + text
        found = find(text, self._stops)
        if found is None:
            end = len(text) - held(text, self._stops)
            self._held = text[end:]
            return text[:end]
        self._stopped = True
        self._held = ""
        return text[: found[0]]

    def finish(self, matched: str | None = None) -> str:
        """End the text, and return the part that was held back.

        ``matched``: the stop string that the engine ended at. The engine may have sent a beginning of this string in an
        earlier piece. If the held text ends with such a beginning, the beginning is not returned.
        """
        text, self._held = self._held, ""
        return text[: len(text) - held(text, (matched,))] if matched else text
