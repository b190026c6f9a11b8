"""Large JSON documents, read and written in pieces, between which an event loop serves others.

orjson reads a megabyte of text in 1 ms, of token ids in 10 ms, and of nested lists in 90 ms, without a pause. So a
large document is cut at commas: what is open at a cut is closed behind the piece and opened again before the next
one, and what orjson makes of the pieces is put together. A long string is read by itself, and a name stands for it
meanwhile.
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

__all__ = ["InvalidJson", "as_numpy", "dump", "parse"]

#: Bytes of a piece: 0.3 ms of ids, 1.5 ms of the worst.
_PIECE = 1 << 14
#: Strings, lists and objects; more would take many times the memory of the document.
_MAX_VALUES = 1 << 18
_MAX_DEPTH = 1024
#: Integers in a list that is worth an array.
_LONG_LIST = 1 << 12
#: The key of what was open before a piece. Nobody can know it, and put it into a document.
_OPEN = token_hex(16)
#: Stands for a long string, with its number behind it.
_NAME = token_hex(16)
#: Bytes of a long string, and of what is read of it in one go.
_LONG_STRING = 1 << 18
_AT_ONCE = 1 << 20
#: Bytes of the longest escape (a surrogate pair), and of what is searched for a place without one.
_ESCAPE = 12
_SEARCHED = 1 << 12
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_SPACE = b" \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]*")


class InvalidJson(ValueError):
    """A document that is not JSON, or has too many values."""


def as_numpy(value: Any) -> npt.NDArray[np.int32]:
    """An array of :func:`parse` as orjson can write it: its ``default``. Raises TypeError for anything else."""
    if isinstance(value, array):
        return np.frombuffer(value, np.int32)
    raise TypeError(f"{type(value).__name__} is not JSON")


def parse(
    body: bytes, *, max_values: int | None = _MAX_VALUES, packs: bool = True, piece: int = _PIECE
) -> Generator[None, None, Any]:
    """Read ``body`` in pieces of some ``piece`` bytes; the value returned is what orjson would make of it.

    But with ``packs`` a long list of integers is an ``array("i")``, with a ninth of the memory. Raises InvalidJson,
    also for more than ``max_values`` strings, lists and objects.
    """
    scan, document = _Scan(body, piece), _Document(max_values, packs=packs)
    start = 0
    while True:
        cut = yield from scan.next_cut(start)
        yield from document.add(_LongStrings(body, start, cut), cut, is_last=cut.end == len(body))
        if cut.end == len(body):
            return document.whole
        start = cut.end + 1
        yield


def dump(value: dict[str, Any]) -> Generator[None, None, bytes]:
    """Write ``value`` in pieces; fields may be arrays of ids or lists of those. Raises orjson.JSONEncodeError."""
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


@dataclass(frozen=True, slots=True)
class _Cut:
    """The end of a piece, at a comma or with the document.

    ``kept``: how many containers were open all the time. ``opened``: places, from the piece's beginning, of the
    brackets that are open at its end beside those. ``values``: strings, lists and objects in the piece. ``strings``:
    where in the document there is nothing but a part of a long string, which is no part of the piece.
    """

    end: int
    kept: int
    opened: list[int]
    values: int
    commas: int
    strings: list[tuple[int, int]]


class _Scan:
    """Finds commas that stand in no string, and the brackets that are open there."""

    def __init__(self, body: bytes, piece: int) -> None:
        self._body = body
        self._piece = piece
        self._open: list[int] = []
        self._kept = self._values = self._commas = 0
        self._in_string = self._escaped = False
        self._quote = -1
        self._strings: list[tuple[int, int]] = []

    def next_cut(self, start: int) -> Generator[None, None, _Cut]:
        """The cut after ``start``, where a piece begins. Raises InvalidJson."""
        self._kept, self._values, self._commas = len(self._open), 0, 0
        self._strings = []
        position = start
        while True:
            if self._in_string:
                begin, position = position, self._string_end(position)
                self._strings += _long_string(self._body, begin, position)
            window = self._body[position : position + self._piece]
            is_last = position + self._piece >= len(self._body)
            size = self._see(window, position, is_last=is_last)
            position += size
            if is_last or size < len(window):
                opened = [place - start - self._left_out(place) for place in self._open[self._kept :]]
                return _Cut(position, self._kept, opened, self._values, self._commas, self._strings)
            yield

    def _left_out(self, place: int) -> int:
        """Bytes before ``place`` that the piece lacks, because names stand in it for long strings."""
        return sum(end - begin - len(_name(begin)) for begin, end in self._strings if end <= place)

    def _string_end(self, position: int) -> int:
        """The place, from ``position`` on, of a quote that may end the string there."""
        if self._quote < position:  # else it was found, and backslashes had to be looked at
            self._quote = self._body.find(b'"', position)
        quote = self._quote
        if quote < 0:
            raise InvalidJson("a string does not end")
        before = (
            self._body[quote - self._piece : quote].rstrip(b"\\") if quote - position > self._piece else b""
        )
        if not before:  # it costs no more to look at each character
            return position
        self._escaped = (self._piece - len(before)) % 2 > 0
        return quote

    def _see(self, window: bytes, position: int, *, is_last: bool) -> int:
        """Take in ``window`` up to its last comma; without one, and of the last window, all. Returns how much."""
        plain = b" " + window[1:] if self._escaped else window
        plain = _ESCAPED.sub(b"  ", plain) if b"\\" in plain else plain
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
            self._see_brackets(places + position, braces[places] == 0x7B)
        return size

    def _see_brackets(self, places: npt.NDArray[np.int64], opens: npt.NDArray[np.bool_]) -> None:
        depths = len(self._open) + np.cumsum(np.where(opens, 1, -1))
        lowest, depth = min(len(self._open), int(depths.min())), int(depths[-1])
        if lowest < 0 or depth > _MAX_DEPTH:
            raise InvalidJson("unexpected end of a list or object" if lowest < 0 else "nested too deeply")
        self._values += int(np.count_nonzero(opens))
        self._kept = min(self._kept, lowest)
        del self._open[lowest:]
        opening, levels = places[opens], depths[opens]
        self._open += [int(opening[levels == level][-1]) for level in range(lowest + 1, depth + 1)]


@dataclass(slots=True)
class _Container:
    """A list or object that is not closed yet; ``key`` leads to it from the one around it."""

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
    """The values of the pieces, put together. ``whole`` is complete after the last one."""

    def __init__(self, max_values: int | None, *, packs: bool) -> None:
        self.whole: Any = None
        self._max_values = max_values
        self._packs = packs
        self._open: list[_Container] = []
        self._values = 0
        self._is_first = True

    def add(self, strings: _LongStrings, cut: _Cut, *, is_last: bool) -> Generator[None, None, None]:
        """Add the next piece, which has names for its long ``strings``. Raises InvalidJson."""
        piece = strings.piece
        if is_last and (cut.kept or cut.opened):
            raise InvalidJson("unexpected end of data")
        self._values += cut.values
        if self._max_values is not None and self._values > self._max_values:
            raise InvalidJson(f"more than {self._max_values} strings, lists and objects")
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

    def _read(self, piece: memoryview, cut: _Cut, first: int) -> Any:
        """Parse the part of open container number ``first`` in ``piece``; in it, that of the next one, and so on."""
        if not self._is_first and (not self._open or _outermost(piece)[0] in (b"]", b"}", b"")):
            raise InvalidJson("a comma with no value behind it")
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
        """Put ``made`` into the open containers from number ``first`` on: each begins with what the next one gets.

        The innermost comes first: its key may be repeated behind it, and then has another value.
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
        """Open the next container. ``before``: the piece from the bracket of the container around it to its own."""
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
    """The first and the last byte that is no space."""
    spaces = _SPACES.match(piece)
    start, end = spaces.end() if spaces is not None else 0, len(piece)
    while end > start:
        last = bytes(piece[max(start, end - _PIECE) : end]).rstrip(_SPACE)
        if last:
            return bytes(piece[start : start + 1]), last[-1:]
        end -= _PIECE
    return b"", b""


def _key_before(text: bytes) -> Any:
    """The key of the object whose value begins behind ``text``."""
    text = text.rstrip(_SPACE).removesuffix(b":").rstrip(_SPACE)
    start = _ESCAPED.sub(b"  ", text).rfind(b'"', 0, -1)
    return orjson.loads(text[start:])


def _name(begin: int) -> bytes:
    """Return the placeholder for a part of a long string from ``begin`` on: always of one length."""
    return b"%b%016x" % (_NAME.encode(), begin)


def _long_string(body: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the range within ``begin`` to ``end`` of a string's inside that is read by itself: nearly all, or none."""
    if end - begin < _LONG_STRING:
        return []
    first = _no_escape(body, begin + _ESCAPE, end)
    last = _no_escape(body, max(begin + _ESCAPE, end - _SEARCHED), end)
    return [(first, last)] if first is not None and last is not None and first < last else []


def _no_escape(body: bytes | memoryview, place: int, end: int) -> int | None:
    """The first place from ``place`` on, in a string, at which neither an escape nor a character is cut in two."""
    near = bytes(body[place - _ESCAPE : min(place + _SEARCHED, end)])
    for at in range(_ESCAPE, len(near)):
        if near[at] & 0xC0 != 0x80 and near.find(b"\\", at - _ESCAPE, at) < 0:
            return place - _ESCAPE + at
    return None


class _LongStrings:
    """The long strings of a piece, which is ``piece`` with names in their places.

    ``known``: strings that have been read, by what stands for them.
    """

    def __init__(self, body: bytes, start: int, cut: _Cut) -> None:
        self._body = memoryview(body)
        self._places = {_name(begin).decode(): (begin, end) for begin, end in cut.strings}
        self.known: dict[str, str] = {}
        self.piece = self._body[start : cut.end]
        if cut.strings:
            left: list[bytes | memoryview] = []
            for begin, end in cut.strings:
                left += [self._body[start:begin], _name(begin)]
                start = end
            self.piece = memoryview(b"".join([*left, self._body[start : cut.end]]))

    def put_into(self, value: Any) -> Generator[None, None, Any]:
        """``value`` with the strings that names stand for. Raises InvalidJson."""
        whole = [value]
        containers: list[Any] = [whole]
        while containers:
            container = containers.pop()
            if isinstance(container, dict) and any(_NAME in key for key in container):
                pairs = list(container.items())
                container.clear()
                for key, item in pairs:
                    container[(yield from self._whole(key)) if _NAME in key else key] = item
            places = container.items() if isinstance(container, dict) else enumerate(container)
            for place, item in list(places):
                if isinstance(item, str) and _NAME in item:
                    container[place] = yield from self._whole(item)
                elif isinstance(item, list | dict):
                    containers.append(item)
        return whole[0]

    def _whole(self, named: str) -> Generator[None, None, str]:
        before, *rest = named.split(_NAME)
        text = before
        for one in rest:
            begin, end = self._places[_NAME + one[:16]]
            while begin < end:
                stop = self._stop(begin, end)
                try:
                    # It grows in its place. A copy of all of it would be a long time's work, and as much memory.
                    text += orjson.loads(b"".join((b'"', self._body[begin:stop], b'"')))
                except orjson.JSONDecodeError as error:
                    raise InvalidJson(str(error)) from None
                begin = stop
                yield
            text += one[16:]
        self.known[named] = text
        return text

    def _stop(self, begin: int, end: int) -> int:
        """The end of what is read in one go."""
        while (begin := begin + _AT_ONCE) < end:
            stop = _no_escape(self._body, begin, end)
            if stop is not None:
                return stop
        return end


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
    """``value`` with arrays in the place of its long lists of integers."""
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
