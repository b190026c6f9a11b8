"""Long strings of a JSON document, read separately, while a placeholder stands for each in its piece."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import orjson

from slime_fairness.json_pieces import PLACEHOLDER, Cut, InvalidJson, placeholder, safe_cut

__all__ = ["LongStrings"]

#: Bytes of a long string that are read in one go.
_AT_ONCE = 1 << 20


class LongStrings:
    """The long strings of a piece. ``piece`` has placeholders in their places.

    ``known``: the strings that have been read, by their text with placeholders.
    """

    def __init__(self, body: bytes, start: int, cut: Cut) -> None:
        self._body = memoryview(body)
        self._places = {placeholder(begin).decode(): (begin, end) for begin, end in cut.strings}
        self.known: dict[str, str] = {}
        self.piece = self._body[start : cut.end]
        if cut.strings:
            left: list[bytes | memoryview] = []
            for begin, end in cut.strings:
                left += [self._body[start:begin], placeholder(begin)]
                start = end
            self.piece = memoryview(b"".join([*left, self._body[start : cut.end]]))

    def put_into(self, value: Any) -> Generator[None, None, Any]:
        """Return ``value`` with long strings in place of their placeholders. Raises InvalidJson."""
        whole = [value]
        containers: list[Any] = [whole]
        while containers:
            container = containers.pop()
            if isinstance(container, dict) and any(PLACEHOLDER in key for key in container):
                pairs = list(container.items())
                container.clear()
                for key, item in pairs:
                    container[(yield from self._whole(key)) if PLACEHOLDER in key else key] = item
            places = container.items() if isinstance(container, dict) else enumerate(container)
            for place, item in list(places):
                if isinstance(item, str) and PLACEHOLDER in item:
                    container[place] = yield from self._whole(item)
                elif isinstance(item, list | dict):
                    containers.append(item)
        return whole[0]

    def _whole(self, named: str) -> Generator[None, None, str]:
        before, *rest = named.split(PLACEHOLDER)
        text = before
        for one in rest:
            begin, end = self._places[PLACEHOLDER + one[:16]]
            while begin < end:
                stop = self._stop(begin, end)
                try:
                    # CPython extends the string in place. A copy would take long, and as much memory again.
                    text += orjson.loads(b"".join((b'"', self._body[begin:stop], b'"')))
                except orjson.JSONDecodeError as error:
                    raise InvalidJson(str(error)) from None
                begin = stop
                yield
            text += one[16:]
        self.known[named] = text
        return text

    def _stop(self, begin: int, end: int) -> int:
        """Return the end of the part that is read in one go."""
        while (begin := begin + _AT_ONCE) < end:
            stop = safe_cut(self._body, begin, end)
            if stop is not None:
                return stop
        return end
