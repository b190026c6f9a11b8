"""Search for places at which to cut a large JSON document into pieces: commas outside strings.

The search also finds the brackets that are open at each place.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from secrets import token_hex

import numpy as np
import numpy.typing as npt

__all__ = ["ESCAPED", "PLACEHOLDER", "Cut", "InvalidJson", "Scan", "TooManyValues", "placeholder", "safe_cut"]

#: First part of the placeholder for a long string; the string's position follows.
PLACEHOLDER = token_hex(16)
ESCAPED = re.compile(rb"\\.", re.DOTALL)
_MAX_DEPTH = 1024
#: Smallest number of bytes of a string that is read separately.
_LONG_STRING = 1 << 18
#: Length in bytes of the longest escape (a surrogate pair).
_ESCAPE = 12
#: How many bytes are searched for a place that is not inside an escape.
_SEARCHED = 1 << 12


class InvalidJson(ValueError):
    """A document that is not JSON."""


class TooManyValues(ValueError):
    """A document whose Python objects would take many times the memory of its bytes."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a piece, at a comma or at the end of the document.

    ``kept``: the number of containers (lists and objects) that were open throughout the piece. ``opened``: the place in
    the piece of each bracket that opens in it and is still open at its end. ``values``: the number of strings, lists
    and objects; some strings may be missing. ``commas``: the number of commas. ``strings``: ranges of the document
    inside long strings; placeholders replace them in the piece.
    """

    end: int
    kept: int
    opened: list[int]
    values: int
    commas: int
    strings: list[tuple[int, int]]


class Scan:
    """Finds commas outside strings, and the brackets that are open at these commas."""

    def __init__(self, body: bytes, piece: int) -> None:
        self._body = body
        self._piece = piece
        self._open: list[int] = []
        self._kept = self._values = self._commas = 0
        self._in_string = self._escaped = False
        self._quote = -1
        self._strings: list[tuple[int, int]] = []

    def next_cut(self, start: int) -> Generator[None, None, Cut]:
        """Return the cut that ends the piece beginning at ``start``. Raises InvalidJson."""
        self._kept, self._values, self._commas = len(self._open), 0, 0
        self._strings = []
        position = start
        while True:
            if self._in_string:
                begin, position = position, self._string_end(position)
                self._strings += _long_string(self._body, begin, position)
            window = self._body[position : position + self._piece]
            is_last = position + self._piece >= len(self._body)
            size = self._scan_window(window, position, is_last=is_last)
            position += size
            if is_last or size < len(window):
                opened = [place - start - self._left_out(place) for place in self._open[self._kept :]]
                return Cut(position, self._kept, opened, self._values, self._commas, self._strings)
            yield

    def _left_out(self, place: int) -> int:
        """Return the number of bytes before ``place`` that placeholders save in the piece."""
        return sum(end - begin - len(placeholder(begin)) for begin, end in self._strings if end <= place)

    def _string_end(self, position: int) -> int:
        """Return the place of the next quote, if skipping to it saves work; else ``position``. Raises InvalidJson."""
        if self._quote < position:  # else an earlier call has found it
            self._quote = self._body.find(b'"', position)
        quote = self._quote
        if quote < 0:
            raise InvalidJson("a string does not end")
        before = (
            self._body[quote - self._piece : quote].rstrip(b"\\") if quote - position > self._piece else b""
        )
        if not before:  # the quote is near, or there are only backslashes: look at each character
            return position
        self._escaped = (self._piece - len(before)) % 2 > 0
        return quote

    def _scan_window(self, window: bytes, position: int, *, is_last: bool) -> int:
        """Scan ``window`` up to its last comma, or whole if it has none or is the last. Returns the number of bytes."""
        plain = b" " + window[1:] if self._escaped else window
        plain = ESCAPED.sub(b"  ", plain) if b"\\" in plain else plain
        signs = np.frombuffer(plain, np.uint8)
        quotes = signs == 0x22
        in_string = np.bitwise_xor.accumulate(quotes) ^ self._in_string
        commas = np.flatnonzero((signs == 0x2C) & ~in_string)
        size = int(commas[-1]) if len(commas) and not is_last else len(window)
        self._commas += len(commas)
        self._values += int(np.count_nonzero(quotes[:size])) // 2
        self._escaped = size == len(window) and plain.endswith(b"\\")
        self._in_string = size == len(window) and bool(in_string[-1:].any())
        braces = signs[:size] | 0x20  # a bracket becomes a brace
        places = np.flatnonzero(((braces == 0x7B) | (braces == 0x7D)) & ~in_string[:size])
        if len(places):
            self._scan_brackets(places + position, braces[places] == 0x7B)
        return size

    def _scan_brackets(self, places: npt.NDArray[np.int64], opens: npt.NDArray[np.bool_]) -> None:
        depths = len(self._open) + np.cumsum(np.where(opens, 1, -1))
        lowest, depth = min(len(self._open), int(depths.min())), int(depths[-1])
        if lowest < 0 or depth > _MAX_DEPTH:
            raise InvalidJson("unexpected end of a list or object" if lowest < 0 else "nested too deeply")
        self._values += int(np.count_nonzero(opens))
        self._kept = min(self._kept, lowest)
        del self._open[lowest:]
        opening, levels = places[opens], depths[opens]
        self._open += [int(opening[levels == level][-1]) for level in range(lowest + 1, depth + 1)]


def _long_string(body: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the range to read separately if ``begin`` to ``end`` is a long string: nearly all of it. Else ``[]``."""
    if end - begin < _LONG_STRING:
        return []
    first = safe_cut(body, begin + _ESCAPE, end)
    last = safe_cut(body, max(begin + _ESCAPE, end - _SEARCHED), end)
    return [(first, last)] if first is not None and last is not None and first < last else []


def safe_cut(body: bytes | memoryview, place: int, end: int) -> int | None:
    """Return the first place in a string, from ``place`` on, at which a cut divides no escape or character.

    Returns None if no such place is near.
    """
    near = bytes(body[place - _ESCAPE : min(place + _SEARCHED, end)])
    for at in range(_ESCAPE, len(near)):
        if near[at] & 0xC0 != 0x80 and near.find(b"\\", at - _ESCAPE, at) < 0:
            return place - _ESCAPE + at
    return None


def placeholder(begin: int) -> bytes:
    """Return the placeholder for the part of a long string from ``begin`` on. All placeholders have the same length."""
    return b"%b%016x" % (PLACEHOLDER.encode(), begin)
