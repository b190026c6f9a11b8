"""Reads and writes large JSON documents in pieces, so that the event loop serves others in between.

orjson reads a megabyte of text in 1 ms, of token ids in 10 ms, and of nested lists in 90 ms, without a pause. So a
large document is cut at commas. Lists and objects that are open at a cut are closed behind the piece, and opened again
before the next piece. The parts that orjson makes of the pieces are put together. A long string is read separately,
and a placeholder stands for it in its piece.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from slime_fairness.json_pieces import ESCAPED, Cut, InvalidJson, Scan, TooManyValues
from slime_fairness.long_strings import LongStrings

__all__ = ["InvalidJson", "TooManyValues", "as_numpy", "dump", "parse"]

#: Bytes of a piece. A piece of ids takes 0.3 ms, the worst case 1.5 ms.
_PIECE = 1 << 14
#: Any document may have ``_FEW_VALUES`` strings, lists and objects, and none may have more than ``_MAX_VALUES``. In
#: between, it may have one per ``_BYTES_PER_VALUE`` bytes, since each takes some hundred bytes in Python.
_FEW_VALUES, _MAX_VALUES, _BYTES_PER_VALUE = 1 << 16, 1 << 18, 32
#: Least length of a list of integers that becomes an array.
_LONG_LIST = 1 << 12
#: The key of a continued container in the continued object around it. It is random, so no client can send it.
_OPEN = token_hex(16)
_SPACE = b" \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]*")


def as_numpy(value: Any) -> npt.NDArray[np.int32]:
    """Convert an array that :func:`parse` made; for orjson's ``default``. Raises TypeError for anything else."""
    if isinstance(value, array):
        return np.frombuffer(value, np.int32)
    raise TypeError(f"{type(value).__name__} is not JSON")


def parse(
    body: bytes, *, is_limited: bool = True, packs: bool = True, piece: int = _PIECE
) -> Generator[None, None, Any]:
    """Read ``body`` in pieces of about ``piece`` bytes, and return what orjson would make of ``body``.

    But with ``packs`` a long list of 32-bit integers is an ``array("i")``, which takes a ninth of the memory. Raises
    InvalidJson; if ``is_limited``, also TooManyValues for a document that would take many times its own memory.
    """
    most = min(max(_FEW_VALUES, len(body) // _BYTES_PER_VALUE), _MAX_VALUES) if is_limited else None
    cuts = yield from _cuts(body, piece, most)
    document = _Document(packs=packs)
    start = 0
    for cut in cuts:
        yield from document.add(LongStrings(body, start, cut), cut, is_last=cut.end == len(body))
        start = cut.end + 1
        yield
    return document.whole


def _cuts(body: bytes, piece: int, most: int | None) -> Generator[None, None, list[Cut]]:
    """Return all cuts of ``body``; the last one is its end. Raises TooManyValues before any piece is parsed."""
    scan, cuts, values, start = Scan(body, piece), [], 0, 0
    while True:
        cut = yield from scan.next_cut(start)
        cuts.append(cut)
        values += cut.values
        if most is not None and values > most:
            raise TooManyValues(
                f"wanted at most {most} strings, lists and objects in a body of {len(body)} bytes, got more"
            )
        if cut.end == len(body):
            return cuts
        start = cut.end + 1
        yield


def dump(value: dict[str, Any]) -> Generator[None, None, bytes]:
    """Write ``value`` in pieces; fields may be arrays of ids or lists of such arrays. Raises orjson.JSONEncodeError."""
    written: list[bytes] = []
    for key, item in value.items():
        written += [b"," if written else b"{", orjson.dumps(key), b":"]
        if isinstance(item, list) and item and all(isinstance(one, array | np.ndarray) for one in item):
            for place, one in enumerate(item):
                written.append(b"," if place else b"[")
                yield from _dump_ids(one, written)
            written.append(b"]")
        elif isinstance(item, array | np.ndarray):
            yield from _dump_ids(item, written)
        else:
            written.append(orjson.dumps(item, as_numpy, orjson.OPT_SERIALIZE_NUMPY))
        yield
    return b"".join(written or [b"{"]) + b"}"


def _dump_ids(ids: array[int] | npt.NDArray[np.int32], written: list[bytes]) -> Generator[None, None, None]:
    rows = as_numpy(ids) if isinstance(ids, array) else ids
    written.append(b"[")
    for start in range(0, len(rows), _PIECE):
        ids_of_piece = orjson.dumps(rows[start : start + _PIECE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        written += [b"," if start else b"", ids_of_piece]
        yield
    written.append(b"]")


@dataclass(slots=True)
class _Container:
    """A list or object that is not closed yet; ``key``: its place in the container around it.

    ``may_be_ids``: False for a list in which something other than a 32-bit integer was found.
    """

    value: Any
    key: Any = None
    may_be_ids: bool = True

    @property
    def opener(self) -> bytes:
        return b"{" if isinstance(self.value, dict) else b"["

    @property
    def closer(self) -> bytes:
        return b"}" if isinstance(self.value, dict) else b"]"


class _Document:
    """The values of the pieces, put together. ``whole`` is complete after the last piece."""

    def __init__(self, *, packs: bool) -> None:
        self.whole: Any = None
        self._packs = packs
        self._open: list[_Container] = []
        self._is_first = True

    def add(self, strings: LongStrings, cut: Cut, *, is_last: bool) -> Generator[None, None, None]:
        """Add the next piece, which has placeholders for its long ``strings``. Raises InvalidJson."""
        piece = strings.piece
        if is_last and (cut.kept or cut.opened):
            raise InvalidJson("unexpected end of data")
        first = max(cut.kept - 1, 0)
        made = self._read(piece, cut, first)
        if cut.strings:
            made = yield from strings.put_into(made)
        if self._packs and cut.commas >= _LONG_LIST:
            made = _packed(made)
        if self._is_first:
            self.whole, self._is_first = made, False
        else:
            self._merge(first, made)
        del self._open[cut.kept :]
        before = 0
        for place in cut.opened:
            self._enter(piece[before:place], strings.known)
            before = place + 1

    def _read(self, piece: memoryview, cut: Cut, first: int) -> Any:
        """Parse ``piece`` as part of the open container number ``first``, with parts of the containers inside it."""
        if not self._is_first and (not self._open or _outermost(piece)[0] in (b"]", b"}", b"")):
            raise InvalidJson("a comma in a wrong place")
        if cut.kept + len(cut.opened) and _outermost(piece)[1] in (b"[", b"{", b""):
            raise InvalidJson("a comma with no value before it")
        openers = [one.opener for one in self._open[first:]]
        openers[:-1] = [b'{"%b":' % _OPEN.encode() if one == b"{" else one for one in openers[:-1]]
        closers = [one.closer for one in self._open[first : cut.kept]]
        closers += [b"]" if piece[place] == 0x5B else b"}" for place in cut.opened]
        around = [*openers, *closers]
        try:
            return orjson.loads(b"".join([*openers, piece, *reversed(closers)]) if around else piece)
        except orjson.JSONDecodeError as error:
            raise InvalidJson(str(error)) from None

    def _merge(self, first: int, made: Any) -> None:
        """Add ``made``, the value of a piece, to the open containers: number ``first`` and those inside it.

        ``made`` is a part of container ``first``. The first item of this part is a part of the next container, which is
        inside the first one, and so on. The innermost container gets its part first: a later item of the piece may have
        the same key as that container, and then replaces it.
        """
        each = [made]
        for _ in self._open[first + 1 :]:
            each.append(made := made.pop(0) if isinstance(made, list) else made.pop(_OPEN))
        for number in range(len(self._open) - 1, first - 1, -1):
            rest = each.pop()
            if isinstance(rest, dict):
                self._open[number].value.update(rest)
            elif rest:
                self._extend(number, rest)

    def _extend(self, number: int, rest: list[Any] | array[int]) -> None:
        container = self._open[number]
        if self._packs and container.may_be_ids and len(container.value) + len(rest) >= _LONG_LIST:
            before, behind = _as_ids(container.value), _as_ids(rest)
            container.may_be_ids = before is not None and behind is not None
            if container.may_be_ids and before is not container.value:
                self._replace(number, before)
        if isinstance(container.value, array) and not container.may_be_ids:
            self._replace(number, container.value.tolist())
        container.value.extend(rest)

    def _replace(self, number: int, value: Any) -> None:
        container = self._open[number]
        container.value = value
        if number:
            self._open[number - 1].value[container.key] = value
        else:
            self.whole = value

    def _enter(self, before: memoryview, strings: Mapping[str, str]) -> None:
        """Open the next container of the piece. ``before``: the bytes of the piece before the container's bracket.

        These bytes begin behind the bracket of the previous container, or at the start of the piece.
        """
        if not self._open:
            self._open.append(_Container(self.whole))
            return
        around = self._open[-1].value
        key: Any = len(around) - 1
        if isinstance(around, dict):
            key = _key_before(bytes(before))
            key = strings.get(key, key)
        self._open.append(_Container(around[key], key))


def _outermost(piece: memoryview) -> tuple[bytes, bytes]:
    """Return the first and the last byte that is no space; both empty if there is none."""
    spaces = _SPACES.match(piece)
    start, end = spaces.end() if spaces is not None else 0, len(piece)
    while end > start:
        last = bytes(piece[max(start, end - _PIECE) : end]).rstrip(_SPACE)
        if last:
            return bytes(piece[start : start + 1]), last[-1:]
        end -= _PIECE
    return b"", b""


def _key_before(text: bytes) -> Any:
    """Return the key whose value begins behind ``text``."""
    text = text.rstrip(_SPACE).removesuffix(b":").rstrip(_SPACE)
    start = ESCAPED.sub(b"  ", text).rfind(b'"', 0, -1)
    return orjson.loads(text[start:])


def _as_ids(values: list[Any] | array[int]) -> array[int] | None:
    if isinstance(values, array):
        return values
    if set(map(type, values)) != {int}:  # a boolean is an integer for array()
        return None
    try:
        return array("i", values)
    except OverflowError:
        return None


def _packed(value: Any) -> Any:
    """Return ``value`` with arrays in place of its long lists of integers."""
    whole = [value]
    containers: list[Any] = [whole]
    while containers:
        container = containers.pop()
        places = container.items() if isinstance(container, dict) else enumerate(container)
        for place, item in [pair for pair in places if isinstance(pair[1], list | dict)]:
            ids = _as_ids(item) if isinstance(item, list) and len(item) >= _LONG_LIST else None
            if ids is not None:
                container[place] = ids
            else:
                containers.append(item)
    return whole[0]
