"""Cuts arrays with a row for each token out of an engine's JSON before it is parsed. See ``token_arrays``."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import orjson

from slime_sglang.answers import TOKEN_ARRAYS

if TYPE_CHECKING:
    from slime_sglang.token_arrays import TokenArray

__all__ = ["ArrayCutter", "parsed_with_arrays"]

#: Names of arrays, as the JSON has them. They are never inside a JSON string, where the quotes would be escaped.
_NAMES = tuple(f'"{name}":'.encode() for name in TOKEN_ARRAYS)
_LONGEST = max(map(len, _NAMES))
_SPACE = b" \t\r\n"
#: A whole body is fed in pieces of this many bytes: each piece is copied, so small pieces need little memory.
_PIECE = 1 << 20


class ArrayCutter:
    """Cuts JSON that comes in pieces into its token arrays and the rest. ``keeps``: arrays are decoded, else dropped.

    ``array_bytes``: the largest number of bytes that one array is expected to have in the JSON.
    """

    def __init__(self, *, keeps: bool, array_bytes: int = 0) -> None:
        self._keeps = keeps
        self._array_bytes = array_bytes
        self._json = BytesIO()
        self._rest = b""
        self._arrays: list[TokenArray] = []
        self._broken: set[int] = set()
        self._is_inside = False

    def feed(self, piece: bytes | memoryview) -> None:
        """Take the next bytes. O(bytes)."""
        data = self._rest + bytes(piece) if self._rest else bytes(piece)
        self._rest = b""
        position = 0
        while position < len(data):
            if self._is_inside:
                position = self._inside(data, position)
                if self._is_inside:
                    return
            found = _first_name(data, position)
            if found is None:
                end = max(position, len(data) - _LONGEST)
                self._keep(data, position, end)
                self._rest = data[end:]
                return
            name, value = found
            start = data.find(b'"', value)
            if data[value : start if start >= 0 else None].strip(_SPACE):  # the value is not a string
                self._keep(data, position, value)
                position = value
            elif start < 0:
                self._keep(data, position, name)
                self._rest = data[name:]
                return
            else:
                self._keep(data, position, start + 1)
                position, self._is_inside = start + 1, True
                if self._keeps:
                    self._json.write(b"#%d" % len(self._arrays))  # base64 has no such character
                    self._arrays.append(_new_array(self._array_bytes))

    def _inside(self, data: bytes, position: int) -> int:
        """Decode or drop the array up to its closing quote; return the quote's position, or the end of ``data``."""
        end = data.find(b'"', position)  # base64 has no escapes
        self._is_inside = end < 0
        end = len(data) if end < 0 else end
        if self._keeps:
            number = len(self._arrays) - 1
            try:
                if number not in self._broken:
                    self._arrays[number].feed(memoryview(data)[position:end])
            except ValueError:
                self._broken.add(number)
        return end

    def _keep(self, data: bytes, start: int, end: int) -> None:
        self._json.write(memoryview(data)[start:end])

    def json(self) -> bytes:
        """Return all bytes so far, with a short string in place of each array."""
        self._json.write(self._rest)
        self._rest = b""
        return self._json.getvalue()

    def put_back(self, document: Any) -> Any:
        """Put the decoded arrays into each ``meta_info`` of ``document``, the parsed :meth:`json`. Return ``document``.

        An array that is not base64 becomes an empty string; the last characters are not checked yet. O(answers).
        """
        if self._keeps:
            for answer in document if isinstance(document, list) else [document]:
                meta = answer.get("meta_info") if isinstance(answer, dict) else None
                if isinstance(meta, dict):
                    self._put_into(meta)
        return document

    def _put_into(self, meta: dict[str, Any]) -> None:
        for name in TOKEN_ARRAYS:
            mark = meta.get(name)
            if not (isinstance(mark, str) and mark[:1] == "#" and mark[1:].isdecimal()):
                continue
            number = int(mark[1:])
            if number in self._broken or number >= len(self._arrays):
                meta[name] = ""
            else:
                meta[name] = self._arrays[number]


def _new_array(size: int) -> TokenArray:
    from slime_sglang.token_arrays import TokenArray  # numpy: 20 MB, needed only for kept arrays

    return TokenArray.expecting(size)


def _first_name(data: bytes, position: int) -> tuple[int, int] | None:
    """Return where the first name of an array in ``data[position:]`` begins and ends; None if there is no name."""
    best: tuple[int, int] | None = None
    for name in _NAMES:
        place = data.find(name, position, best[0] if best is not None else len(data))
        if place >= 0:
            best = place, place + len(name)
    return best


def parsed_with_arrays(body: bytes, *, keeps: bool) -> Any:
    """Parse ``body``, the JSON of an answer. Its arrays become ``TokenArray`` if ``keeps``, else ``""``.

    Raises JSONDecodeError.
    """
    cutter = ArrayCutter(keeps=keeps)
    for start in range(0, len(body), _PIECE):
        cutter.feed(memoryview(body)[start : start + _PIECE])
    return cutter.put_back(orjson.loads(cutter.json()))
