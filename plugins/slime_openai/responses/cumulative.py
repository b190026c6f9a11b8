"""The new text of cumulative events. An event repeats the answer so far, so only what it adds is parsed.

Parsing all events of an answer of n tokens would be O(n²), and most clients want only the text.
"""

from __future__ import annotations

import re

import orjson

__all__ = ["GrowingText"]

#: The beginning of SGLang's events.
_START = b'{"text":"'
#: A mark of all events but the last. The mark matches no text in a JSON string, where quotes are escaped.
_GOES_ON = b'"finish_reason":null'
_REST_OF_STRING = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)


class GrowingText:
    """The text of one sequence so far, as the JSON with which its next event begins."""

    def __init__(self) -> None:
        self._known = _START

    def remember(self, event: bytes) -> None:
        """Note that ``event`` was parsed as a whole. The next event repeats its text."""
        self._known = event[: self._end(event, len(_START))] if event.startswith(_START) else b""

    def is_next(self, event: bytes) -> bool:
        """Return True when ``event`` repeats the text of the event before, may add to it, and is not the last."""
        known = self._known
        return bool(known) and event.startswith(known) and event.find(_GOES_ON, len(known)) >= 0

    def next(self, event: bytes) -> str:
        """Return the text that ``event`` adds. :meth:`is_next` must be true for this event."""
        start = len(self._known)
        end = self._end(event, start)
        self._known = event[:end]
        text: str = orjson.loads(b'"%b"' % event[start:end])
        return text

    @staticmethod
    def _end(event: bytes, start: int) -> int:
        match = _REST_OF_STRING.match(event, start)
        return match.end() if match is not None else start
