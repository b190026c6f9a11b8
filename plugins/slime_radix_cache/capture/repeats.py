"""Comparison of the events of a cumulative stream: each repeats the text, the ids and the logprobs of the event before.

The events of an answer of n tokens have O(n²) bytes, so to parse all of them would be slow. Instead, the bytes that
repeat the event before are compared. Only the other bytes are parsed: the new text, ids and logprobs, and facts such as
``completion_tokens``. This suffices only for JSON as SGLang writes it. All other events are parsed and compared by
``AnswerSoFar``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from slime_sglang import PER_TOKEN
from slime_sglang.event_facts import names_last_version, versions_agree

__all__ = ["RepeatedEvents"]

_TEXT, _IDS, _META = b'{"text":"', b'","output_ids":[', b'],"meta_info":'
#: Facts that no event may change. Only the last event may change ``finish_reason``. They are compared as bytes.
_CONSTANT = ("id", "finish_reason", "prompt_tokens", "weight_version")
_SPANS = "weight_versions"
_FINISH, _GOES_ON = b'"finish_reason":', b'"finish_reason":null'
#: Facts that may differ from event to event.
_COUNTS = ("completion_tokens", _SPANS)
_FACTS = frozenset((*_CONSTANT, *PER_TOKEN, _SPANS))
#: Bytes that may follow a value.
_BEHIND_VALUE = b",]}"
_KEYS = ["text", "output_ids", "meta_info"]
_NOTHING = memoryview(b"")


class _List(NamedTuple):
    """A list with an entry for each token. ``key``: the bytes of its key and its opening bracket.

    ``stop``: see :func:`_stop_of`. ``entries``: the bytes between its brackets.
    """

    name: str
    key: bytes
    stop: bytes
    entries: Any  # a memoryview, which mypyc does not accept here


class RepeatedEvents:
    """The events of one sequence of a stream. Each is compared with the event before it."""

    __slots__ = (
        "_after",
        "_begin",
        "_count",
        "_end",
        "_fixed",
        "_has_list",
        "_has_more",
        "_head",
        "_head_names",
        "_ids",
        "_is_ready",
        "_keys",
        "_lists",
        "_open",
        "_piece",
        "_seen",
        "_spans",
        "_stop",
        "_text",
        "_version",
        "new_text",
    )

    def __init__(self) -> None:
        self._is_ready = False
        #: ``_text``: the last event's bytes up to the end of its text. ``_ids``: the bytes of its ids.
        self._text = self._ids = _NOTHING
        #: The bytes behind the ids, as far as the next event repeats them. They end with the entries of the first list
        #: if ``_has_list``, else with a constant fact. ``_open`` stands for them in the bytes that are parsed.
        #: ``_stop``: see :func:`_stop_of`.
        self._head = _NOTHING
        self._open = self._stop = b""
        #: The bytes behind ``meta_info``.
        self._after = b""
        self._has_list = True
        #: The number of facts in ``_head``.
        self._head_names = 0
        #: Those facts before the first list that are not in ``_CONSTANT``; None before the first event.
        self._fixed: dict[str, Any] | None = None
        #: Lists that are not in ``_head``.
        self._lists: list[_List] = []
        #: True if there are lists or spans that are not in ``_head``.
        self._has_more = False
        #: ``_keys``: the names of all facts that are parsed. ``_spans`` and ``_version``: the values of
        #: ``weight_versions`` and ``weight_version``.
        self._keys: list[str] = []
        self._spans: list[Any] = []
        self._version: Any = None
        #: The event that was taken last is ``_piece[_begin:_end]``. ``_count``: its ``completion_tokens``.
        self._piece = b""
        self._begin = self._end = self._count = 0
        #: ``_seen``: the values that :meth:`take_seen` takes over, from the event for which :meth:`see_next` returned
        #: True last. ``new_text``: the text that this event adds.
        self._seen: tuple[Any, ...] = ()
        self.new_text = ""

    def take_held(self) -> bytes | None:
        """Return the event that :meth:`take_seen` took last, and forget it. Return None if there is none."""
        piece, self._piece = self._piece, b""
        return piece[self._begin : self._end] if piece else None

    def expect(self, data: bytes, event: dict[str, Any]) -> bool:
        """Prepare :meth:`see_next` for the events after ``data``. ``event``: the parsed ``data``. O(bytes).

        Return False if :meth:`see_next` cannot compare such events.
        """
        self._is_ready = False
        text, ids, meta = event.get("text"), event.get("output_ids"), event["meta_info"]
        if not (isinstance(text, str) and isinstance(ids, list) and ids and list(event)[:3] == _KEYS):
            return False
        names = list(meta)
        lists = [name for name in PER_TOKEN if name in meta]
        if not all(isinstance(meta[name], list) and meta[name] for name in lists):
            return False
        head = self._head_of(meta, names, lists)
        rest = names[len(head) :]
        if not head or any(name in _CONSTANT for name in rest):
            return False
        has_list = head[-1] in lists
        try:
            self._text = memoryview(_TEXT + orjson.dumps(text)[1:-1])
            self._ids = memoryview(orjson.dumps(ids)[1:-1])
            told = _META + orjson.dumps({name: meta[name] for name in head})
            more = orjson.dumps({name: event[name] for name in event if name not in _KEYS})
            self._lists = [
                _List(name, b'"%b":[' % name.encode(), _stop_of(names, name), _entries(meta[name]))
                for name in rest
                if name in lists
            ]
        except TypeError:  # a TokenArray cannot be written as JSON
            return False
        self._head = memoryview(told[: -2 if has_list else -1])
        self._open = b'{"":[0' if has_list else b'{"":0'
        self._stop = _stop_of(names, head[-1])
        self._after = b"," + more[1:] if len(event) > len(_KEYS) else b"}"
        self._head_names, self._keys = len(head), ["", *rest]
        self._spans, self._version = meta.get(_SPANS) or [], meta.get("weight_version")
        self._has_more = bool(self._lists) or _SPANS in rest
        self._is_ready = True
        # If the bytes of ``data`` are as expected, the comparison finds that ``data`` repeats itself.
        self._is_ready = self.see_next(data, 0, len(data))
        if self._is_ready:
            self.take_seen()
        self._piece = b""
        return self._is_ready

    def stop(self) -> None:
        """Let :meth:`see_next` return False until the next call of :meth:`expect`."""
        self._is_ready = False

    def _head_of(self, meta: dict[str, Any], names: list[str], lists: list[str]) -> list[str]:
        """Return the names at the beginning of ``meta`` whose bytes the next event is expected to repeat."""
        end = first_list = 0
        for place, name in enumerate(names, 1):
            if name in _COUNTS:
                break
            if name in lists:
                first_list = place
                break
            if name in _CONSTANT:
                end = place
        fixed = {name: meta[name] for name in names[: first_list - 1] if name not in _CONSTANT}
        # A fact that has changed may change again. In this case the head ends with a constant fact before the lists.
        self._has_list &= first_list > 0 and self._fixed in (None, fixed)
        self._fixed = fixed
        return names[: first_list if self._has_list else end]

    def see_next(self, piece: bytes, begin: int, end: int) -> bool:
        """Return True if the event ``piece[begin:end]`` repeats the event taken before, and has no finish reason.

        If True, :meth:`take_seen` can take the event. Bytes are compared in place, since copies would take more time
        for long answers. Bytes with a line break are never accepted: an event may end there.
        """
        text, ids, head, after = self._text, self._ids, self._head, self._after
        behind = end - len(after)
        if not (self._is_ready and piece.startswith(text, begin) and piece.startswith(after, behind)):
            return False
        text_end = begin + len(text)
        quote = piece.find(_IDS, text_end, end)
        start = quote + len(_IDS)
        ids_end = start + len(ids)
        bracket = piece.find(b"]", ids_end, end)
        place = bracket + len(head)
        if (
            quote < 0
            or bracket < 0
            or place >= behind
            or not (piece.startswith(ids, start) and piece.startswith(head, bracket))
            or piece[ids_end] not in _BEHIND_VALUE
            or piece[place] not in _BEHIND_VALUE
        ):
            return False
        lists, spans = self._lists, self._spans
        if self._has_more:
            lists = []
            rest = self._without_entries(piece, place, behind, lists)
        else:
            rest = piece[place:behind]
        new = b'["%b",[0%b],%b%b]' % (piece[text_end:quote], piece[ids_end:bracket], self._open, rest)
        if b"\n" in new:  # all other bytes repeat bytes without a line break
            return False
        try:
            told = orjson.loads(new)
        except orjson.JSONDecodeError:
            return False
        if len(told) != 3 or list(told[2]) != self._keys:
            return False
        count = told[2].get("completion_tokens")
        if type(count) is not int or count < self._count:
            return False
        view = memoryview(piece)
        if self._has_list:
            stop = piece.find(self._stop, place, behind) if self._stop else behind - 2
            if stop < 0:
                return False
            head = view[bracket:stop]
        if self._has_more:
            spans = told[2].get(_SPANS) or []
            if bool(spans) != bool(self._spans) or not self._has_marks(told[2]):
                return False
            if not (versions_agree(self._spans, spans) and names_last_version(self._version, spans)):
                return False
        self.new_text = told[0]
        self._seen = view[begin:quote], view[start:bracket], head, lists, spans, piece, begin, end, count
        return True

    def take_seen(self) -> None:
        """Take the event for which :meth:`see_next` returned True last: the next event is compared with this one."""
        (
            self._text, self._ids, self._head, self._lists, self._spans,
            self._piece, self._begin, self._end, self._count,
        ) = self._seen  # fmt: skip

    def repeats_all(self, last: bytes, meta: dict[str, Any]) -> bool:
        """Return True if ``last``, the last event of the sequence, repeats the event before it, finish reason aside.

        ``meta``: the ``meta_info`` of ``last``. Return False, too, if the two events cannot be compared. O(bytes).
        """
        rest = list(meta)[self._head_names :]
        if {*rest} & _FACTS != {*self._keys} & _FACTS:
            return False
        self._keys = ["", *rest]
        data = last.replace(_FINISH + orjson.dumps(meta["finish_reason"]), _GOES_ON, 1)
        return self.see_next(data, 0, len(data))

    def _without_entries(self, piece: bytes, place: int, end: int, lists: list[_List]) -> bytes:
        """Return ``piece[place:end]`` with a 0 in place of the repeated entries of each list in ``_lists``.

        Append the lists of ``piece`` to ``lists``. Return no bytes if an entry of ``_lists`` is not repeated.
        """
        view = memoryview(piece)
        parts = []
        for name, key, stop, entries in self._lists:
            found = piece.find(key, place, end)
            start = found + len(key)
            behind = start + len(entries)
            if found < 0 or behind >= end or not piece.startswith(entries, start):
                return b""
            parts.append(piece[place:start])
            place = behind
            close = piece.find(stop, place, end) if stop else end - 2
            if piece[place] not in _BEHIND_VALUE or close < 0:
                return b""
            lists.append(_List(name, key, stop, view[start:close]))
        parts.append(piece[place:end])
        return b"0".join(parts)

    def _has_marks(self, meta: dict[str, Any]) -> bool:
        """Return True if the lists in ``meta`` begin with the 0 of :meth:`_without_entries`."""
        return all(isinstance(meta[one.name], list) and meta[one.name][:1] == [0] for one in self._lists)


def _entries(values: list[Any]) -> memoryview:
    return memoryview(orjson.dumps(values)[1:-1])


def _stop_of(names: list[str], name: str) -> bytes:
    """Return the bytes from the end of the list ``name`` to the end of the next key; no bytes if no key follows.

    The same bytes are never inside a JSON string, where the quotes would be escaped.
    """
    following = names[names.index(name) + 1 :][:1]
    return b'],"%b":' % following[0].encode() if following else b""
