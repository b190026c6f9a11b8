"""Arrays with a row for each token in an engine's answer, such as ``routed_experts``.

Format: standard base64 of little-endian int32 in C order. An answer may have 64 MiB of base64. So ``array_cutter`` cuts
arrays out of the JSON before parsing. An array is decoded in pieces to the narrowest type that holds its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

__all__ = [
    "IntArray",
    "TokenArray",
    "array_in",
    "dumped",
    "encoded",
    "may_be_recomputed",
]

#: Characters of base64 that hold whole values: 16 are 12 bytes, or three values.
_UNIT, _UNIT_VALUES = 16, 3
#: Characters that are decoded at once, so that the values fit in a core's cache.
_BLOCK = 1 << 18
#: The largest number of values for which memory is reserved at once, even if more values are expected.
_MAX_CAPACITY = 1 << 28

_BYTE, _SHORT = np.dtype(np.uint8), np.dtype(np.uint16)
_SIGNED, _UNSIGNED = np.dtype("<i4"), np.dtype("<u4")

IntArray = npt.NDArray[np.integer[Any]]


class TokenArray:
    """One array, decoded while its characters come. ``values``: all values, flat, as uint8, uint16 or int32.

    ``capacity``: the largest number of values that is expected. Memory for that many values is reserved (at most
    ``_MAX_CAPACITY``), but the memory beyond the actual values is never touched.
    """

    __slots__ = ("_capacity", "_parts", "_rest", "_used", "_values")

    def __init__(self, capacity: int = 0) -> None:
        #: The type of each part is as wide as that of the part before, or wider. All parts but the last are full; the
        #: last part has ``_used`` values.
        self._parts: list[IntArray] = []
        self._used = 0
        self._capacity = min(capacity, _MAX_CAPACITY)
        self._rest = b""
        self._values: IntArray | None = None

    @classmethod
    def of(cls, values: IntArray) -> TokenArray:
        """Return the array of ``values``."""
        array = cls()
        array._values = values.reshape(-1)
        return array

    @classmethod
    def expecting(cls, characters: int) -> TokenArray:
        """Return an array that is expected to have at most ``characters`` of base64."""
        return cls(characters * _UNIT_VALUES // _UNIT)

    def feed(self, characters: bytes | memoryview) -> None:
        """Decode the next ``characters``. Raises ValueError if they are not base64. O(characters)."""
        new = memoryview(characters)
        if self._rest:  # copy only the unit that begins with this rest
            missing = -len(self._rest) % _UNIT or _UNIT
            begun = self._rest + bytes(new[:missing])
            new = new[missing:]
            if not new:
                self._feed(memoryview(begun))
                return
            self._decode(begun)
        self._feed(new)

    def _feed(self, characters: memoryview) -> None:
        whole = len(characters) // _UNIT * _UNIT
        if whole == len(characters) and bytes(characters[-1:]) == b"=":
            whole -= _UNIT  # padding ends the array
        for start in range(0, whole, _BLOCK):
            self._decode(characters[start : min(start + _BLOCK, whole)])
        self._rest = bytes(characters[whole:])

    @property
    def values(self) -> IntArray:
        """All values. Raises ValueError if the characters are not base64 of whole int32 values."""
        if self._values is None:
            if self._rest:
                self._decode(self._rest)
            self._end_part()
            parts, self._parts, self._rest = self._parts, [], b""
            self._values = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        return self._values

    def _decode(self, characters: bytes | memoryview) -> None:
        data = pybase64.b64decode(characters, validate=True)
        if len(data) % 4:
            raise ValueError(
                f"wanted base64 of whole int32 values, but {len(data) % 4} bytes are left after the last one"
            )
        values = np.frombuffer(data, _SIGNED)
        kind = _narrowest(values)
        end = self._used + len(values)
        last = self._parts[-1] if self._parts else None
        if last is None or last.itemsize < kind.itemsize or len(last) < end:
            self._end_part()
            if last is not None and last.itemsize > kind.itemsize:
                kind = last.dtype
            last = np.empty(max(self._capacity, len(values)), kind)
            self._parts.append(last)
            end = len(values)
        last[self._used : end] = values
        self._used = end
        self._capacity -= len(values)

    def _end_part(self) -> None:
        if self._parts:
            self._parts[-1] = self._parts[-1][: self._used]
        self._used = 0


def _narrowest(values: npt.NDArray[np.int32]) -> np.dtype[np.integer[Any]]:
    """Return uint8 or uint16 if it holds all ``values``, else int32."""
    # as unsigned, a negative value is at least 1 << 31
    highest = np.maximum.reduce(values.view(_UNSIGNED), initial=0)
    return _BYTE if highest < 1 << 8 else _SHORT if highest < 1 << 16 else _SIGNED


def array_in(value: Any) -> TokenArray | None:
    """Return the array that ``value`` of a parsed answer stands for; None if ``value`` cannot be an array.

    Raises ValueError for a text that is not base64. The end of the text is checked only by ``values``.
    """
    if isinstance(value, TokenArray):
        return value
    if not isinstance(value, str) or not value.isascii():
        return None
    array = TokenArray.expecting(len(value))
    array.feed(value.encode())
    return array


def may_be_recomputed(meta: Mapping[str, Any], versions: Collection[object]) -> bool:
    """Return True if the rows in ``meta`` may have been computed with other weights than those that sampled the tokens.

    ``versions``: an entry for each version that sampled tokens, None for an unknown version. An engine that retracts a
    sequence computes all tokens of the sequence again later. SGLang then has only the later rows, since it keeps rows
    by their place in the KV cache (``RoutedExpertsCapturer``). ``num_retractions`` is the number of retractions.
    """
    retractions = meta.get("num_retractions")
    if type(retractions) is int and not retractions:
        return False
    return len(versions) > 1 or (None in versions and retractions is not None)


def encoded(values: IntArray) -> str:
    """Return ``values`` as engines write them: base64 of little-endian int32."""
    return pybase64.b64encode_as_string(np.ascontiguousarray(values, "<i4").data)


def dumped(document: Any) -> bytes:
    """Return ``document`` as JSON, with its arrays in base64."""
    return orjson.dumps(document, default=_text_of)


def _text_of(value: Any) -> str:
    if isinstance(value, TokenArray):
        return encoded(value.values)
    raise TypeError
