"""Comparison of the events of a cumulative stream: each repeats text, ids and logprobs of the one before.

Parsing every event of an answer of n tokens would be O(n²) and slow. So the raw bytes of events are compared.
"""

from __future__ import annotations

__all__ = ["RepeatedEvents"]

#: None can occur inside a JSON string, where the quotes would be escaped. SGLang writes the text first.
_TEXT, _IDS, _LOGPROBS = b'"text":', b'"output_ids":', b'"output_token_logprobs":[['


class RepeatedEvents:
    """The events of one sequence. ``took_back``: an event did not repeat the one before it."""

    __slots__ = ("_ids", "_logprobs", "_text", "took_back")

    def __init__(self) -> None:
        self.took_back = False
        self._text = self._ids = self._logprobs = b""

    def see(self, event: bytes, *, is_last: bool = False) -> None:
        """Take the next ``event``. The text of the last event may be shorter, since a stop string is trimmed."""
        start = event.find(_IDS)
        if start < 0:
            return
        ids = event[start : event.find(b"]", start)]
        begin = max(event.find(_TEXT, 0, start), 0)
        text = event[begin : event.rfind(b'"', begin, start)]  # without the quote at its end
        repeats = text.startswith(self._text) or (is_last and self._text.startswith(text))
        if not (repeats and _begins(ids, self._ids) and self._repeats_logprobs(event)):
            self.took_back = True
        self._text, self._ids = text, ids

    def _repeats_logprobs(self, event: bytes) -> bool:
        start = event.find(_LOGPROBS)
        if start < 0:
            return True
        known = self._logprobs
        self._logprobs = event[start : event.find(b"]]", start + len(known))]
        return self._logprobs.startswith(known)


def _begins(ids: bytes, known: bytes) -> bool:
    """Return True if ``ids`` begin with ``known``, and not in the middle of a number."""
    return ids.startswith(known) and not (known[-1:].isdigit() and ids[len(known) : len(known) + 1].isdigit())
