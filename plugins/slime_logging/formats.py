"""Formats of log lines, in which no client and no worker can forge a line.

A record may have ``fields``, a mapping, in its ``extra``: names of letters, digits and underscores, and values that are
strings, numbers, booleans or lists of strings.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

__all__ = ["FORMATS", "JsonLines", "TextLines"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
#: A value that needs no quotes in text.
_BARE = re.compile(r"[!#-<>-\[\]-~]+")
#: Characters that pairs without quotes may have.
_IN_PAIRS = bytes({*range(0x20, 0x7F)} - {*b'"\\'})
#: Types of values that are written as they are; only strings may need quotes.
_PLAIN = frozenset((str, int, float))


class TextLines(logging.Formatter):
    """Lines for people. Escapes control characters, indents tracebacks, and appends ``fields`` as ``name=value``."""

    def __init__(self, form: str = _TEXT) -> None:
        super().__init__(form)
        self._second, self._time = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of ``record``."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        record.message, record.asctime = record.getMessage(), self.formatTime(record)
        return self.formatMessage(record)  # as logging does, without its checks of the format

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # logging's name
        second = int(record.created)
        if second != self._second:
            self._time = time.strftime(self.default_time_format, time.localtime(second))
            self._second = second
        return f"{self._time},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        line = super().formatMessage(record)
        if not line.isprintable():
            line = line.translate(_CONTROL)  # slower than all the rest
        fields = getattr(record, "fields", None)
        return f"{line} {_pairs(fields)}" if fields else line

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # logging's name
        return super().formatException(ei).translate(_CONTROL | {ord("\n"): "\n  "})


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII: ``time`` (UTC), ``level``, ``logger``, ``message``, then the ``fields``.

    The line of an exception also has a ``traceback``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second, self._time = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of ``record``."""
        second = int(record.created)
        if second != self._second:
            self._time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        line = {
            "time": f"{self._time}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if fields := getattr(record, "fields", None):
            line = {**line, **fields, **line}  # no field replaces one of these
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            written = orjson.dumps(line, default=str)
        except TypeError:  # a half of a surrogate pair
            written = b"\xff"
        return written.decode() if written.isascii() else json.dumps(line, default=str, separators=(",", ":"))


#: The formats by their names for ``--log-format``.
FORMATS: Mapping[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def _pairs(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as ``name=value`` pairs in printable ASCII."""
    values = tuple(fields.values())
    if _PLAIN.issuperset(map(type, values)):
        line = _form(tuple(fields)) % values
        # One check of all values: none is empty, and none has a space or an equals sign.
        bare = line.count("=") == len(values) == line.count(" ") + 1 and "= " not in line and line[-1] != "="
        if bare and line.isascii() and not line.encode().translate(None, _IN_PAIRS):
            return line
    return _form(tuple(fields)) % tuple(map(_value, values))


@lru_cache(maxsize=256)
def _form(names: Sequence[str]) -> str:
    return " ".join([f"{name}=%s" for name in names])


def _value(value: Any) -> str:
    kind = type(value)
    if kind is float or kind is int:
        return str(value)
    if kind is bool:
        return "true" if value else "false"
    text = value if kind is str else ",".join(map(str, value)) if kind in (list, tuple) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
