"""Events that repeat everything said before: the new text of each, without parsing the rest again.

Parsing every event of an answer of n tokens whole would be O(n²), and most clients want nothing but the text.
"""

from __future__ import annotations

import re

import orjson

__all__ = ["GrowingText"]

#: The beginning of SGLang's events.
_START = b'{"text":"'
#: In JSON this cannot stand inside a string: there the quotes would be escaped.
_GOES_ON = b'"finish_reason":null'
_REST_OF_STRING = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)


class GrowingText:
    """The text of one sequence's events, as JSON has it."""

    def __init__(self) -> None:
        self._known = _START

    def remember(self, event: bytes) -> None:
        """``event`` was parsed whole: what comes next begins like it."""
        self._known = event[: self._end(event, len(_START))] if event.startswith(_START) else b""

    def new_in(self, event: bytes) -> str | None:
        """The text that ``event`` has beyond the one before; None when it has to be parsed: it is the last, say."""
        if not self._known or not event.startswith(self._known) or _GOES_ON not in event:
            return None
        start = len(self._known)
        end = self._end(event, start)
        self._known = event[:end]
        text: str = orjson.loads(b'"%b"' % event[start:end])
        return text

    @staticmethod
    def _end(event: bytes, start: int) -> int:
        match = _REST_OF_STRING.match(event, start)
        return match.end() if match is not None else start
