"""The events of a cumulative stream, compared as bytes: each repeats text, ids and logprobs of the one before.

To parse every event of an answer of n tokens would be O(n²), in steps of microseconds; this is memory compared.
"""

from __future__ import annotations

__all__ = ["RepeatedEvents"]

#: In JSON none can stand inside a string: there the quotes would be escaped. SGLang writes the text first.
_TEXT, _IDS, _LOGPROBS = b'"text":', b'"output_ids":', b'"output_token_logprobs":[['


class RepeatedEvents:
    """Events of one sequence. ``took_back``: one did not repeat what the one before had told."""

    __slots__ = ("_ids", "_logprobs", "_text", "took_back")

    def __init__(self) -> None:
        self.took_back = False
        self._text = self._ids = self._logprobs = b""

    def see(self, event: bytes, *, is_last: bool = False) -> None:
        """Take the next ``event``. The text of the last one may be shorter: there a stop string is trimmed."""
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
    """True when ``ids`` are ``known`` and more: behind the number 1 comes no digit."""
    return ids.startswith(known) and not (known[-1:].isdigit() and ids[len(known) : len(known) + 1].isdigit())
