"""Requests of clients: bytes first, JSON on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson

from router_core.errors import BadRequest, TooManyValues
from router_core.types import Headers
from slime_http.message_faults import UnwritableBody

__all__ = ["LARGE_BYTES", "Request"]

#: A body of at least this many bytes is parsed in pieces.
LARGE_BYTES = 1 << 17
_UNREAD = object()
_COPY_BYTES = 1 << 16  # add_field copies a smaller body twice
#: A body of at most this many bytes is parsed without a search.
_SMALL = 1 << 11
#: Bytes to search in one step of less than a millisecond.
_PIECE = 1 << 20
_NONE: frozenset[bytes] = frozenset()
#: The beginning of a JSON object, and the first character in it.
_OBJECT = re.compile(rb"([ \t\r\n]*\{[ \t\r\n]*)(.?)", re.DOTALL)


class Request:
    """A request for a worker: a client's, with the changes that plugins have made, or the router's own.

    ``target`` is path and query as on the wire; ``headers`` keep order and duplicates.
    """

    __slots__ = (
        "_absent", "_body", "_escaped", "_invalid", "_json", "_stale", "author", "headers", "method", "target",
    )  # fmt: skip

    def __init__(self, method: str, target: bytes, headers: Headers, body: bytes = b"") -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self._body = body
        self._json: Any = _UNREAD
        self._stale = False
        self._absent = _NONE  # keys that a search has not found
        #: True when the body may have letters written as ``\u0073``; None: unknown.
        self._escaped: bool | None = None
        #: Makes the error for a body that cannot be parsed. A stored error, once raised, would keep the body alive.
        self._invalid: Callable[[], BadRequest] | None = None
        #: The last plugin, of those that do not ship with the router, that replaced a large body.
        self.author: str | None = None

    @property
    def path(self) -> str:
        """Path without query, percent-decoded."""
        return unquote(self.target.partition(b"?")[0].decode("ascii", "replace"))

    @property
    def body(self) -> bytes:
        """The bytes for the worker; encodes a value of :meth:`replace_json`. Raises BadRequest and UnwritableBody."""
        if self._stale:
            try:
                self._body = orjson.dumps(self._json, _as_numpy, orjson.OPT_SERIALIZE_NUMPY)
            except orjson.JSONEncodeError as error:
                raise _not_written(error) from None
            self._stale = False
        return self._body

    def writing(self) -> Generator[None, None, None]:
        """Encode the body in pieces, one per step, for :meth:`Router.write_json`. Raises as :attr:`body` does."""
        from slime_fairness.large_json import dump  # imports numpy, which not every router needs

        if self._stale and isinstance(self._json, dict):
            try:
                self._body = yield from dump(self._json)
            except orjson.JSONEncodeError as error:
                raise _not_written(error) from None
            self._stale = False

    @property
    def is_long_work(self) -> bool:
        """True when :meth:`json` would hold up the event loop: call :meth:`Router.read_json` instead."""
        return self._json is _UNREAD and self._invalid is None and len(self._body) >= LARGE_BYTES

    def reading(self) -> Generator[None, None, None]:
        """Parse the body in pieces, one per step, for :meth:`Router.read_json`."""
        from slime_fairness import large_json  # imports numpy, which not every router needs

        try:
            self._json = yield from large_json.parse(self._body)
        except large_json.TooManyValues as error:
            self._invalid = partial(TooManyValues, str(error))
        except large_json.InvalidJson as error:
            self._invalid = partial(BadRequest, f"the body is not JSON that can be read: {error}")

    def json(self) -> Any:
        """Return the body as JSON, parsed once. Do not change the value; call :meth:`replace_json` with a new one.

        If :meth:`reading` has parsed the body, a long list of 32-bit integers is an ``array("i")``. Raises BadRequest.
        """
        if self._invalid is not None:
            raise self._invalid()
        if self._json is _UNREAD:
            try:
                self._json = orjson.loads(self._body)
            except orjson.JSONDecodeError as error:
                raise BadRequest(f"the body is not JSON: {error}") from None
        return self._json

    def json_object_or_none(self) -> dict[str, Any] | None:
        """Return :meth:`json` if it is an object, else None: the worker answers any other body with its own error."""
        document = self._json
        if document is _UNREAD:
            try:
                document = self.json()
            except BadRequest:
                return None
        return document if isinstance(document, dict) else None

    def field(self, name: str) -> Any:
        """Return the value of the top-level field ``name``. Returns None without that field, or without an object.

        The body is parsed only if it may have the field, see :meth:`may_have`.
        """
        document = self._json
        if document is _UNREAD:
            document = self.json_object_or_none() if self.may_have(name.encode()) else None
        return document.get(name) if isinstance(document, dict) else None

    def may_have(self, name: bytes) -> bool:
        """Return False if a search of the bytes, which is cheaper than parsing, finds no key ``name`` in the body.

        Returns True for a body that is small, was parsed, is known not to be JSON, or may have letters written as
        ``\\u0073``. Searching 16 MB takes 12 ms, so call :meth:`searching` first for a large body.
        """
        if self._json is not _UNREAD or self._invalid is not None or len(self._body) <= _SMALL:
            return True  # one parse costs less than the searches for several names
        if name in self._absent:
            return False
        if self._body.find(b'"%b"' % name) >= 0:  # faster than ``in``
            return True
        if self._escaped is None:
            self._escaped = _has_escapes(self._body)
        return self._escaped

    def searching(self, *names: bytes) -> Generator[None, None, bool]:
        """Search the body for ``names`` in pieces, one per step, for :meth:`Router.read_ahead`.

        Returns True when the body may have one of them. After False, :meth:`may_have` needs no search for these names.
        """
        if self._json is not _UNREAD or self._invalid is not None:
            return True
        keys = [b'"%b"' % name for name in names]
        overlap = max(map(len, keys))
        for start in range(0, len(self._body), _PIECE):
            piece = self._body[start : start + _PIECE + overlap]
            if _has_escapes(piece) or any(key in piece for key in keys):
                return True
            yield
        self._absent = self._absent.union(names)
        return False

    def replace_json(self, value: Any) -> None:
        """Make ``value`` the body, encoded when :attr:`body` is read next. The worker gets the new Content-Length.

        The value may hold numpy arrays; :meth:`json` returns them to later plugins.
        """
        self._json = value
        self._stale, self._invalid = True, None

    def encode_for(self, plugin: str) -> None:
        """Encode the value that ``plugin``, its author, gave a small body. Raises as :attr:`body` does."""
        if self._stale and len(self._body) < LARGE_BYTES:
            _ = self.body
        else:
            self.author = plugin

    def add_field(self, field: bytes) -> None:
        """Add a top-level ``field``, such as ``b'"stream":true'``, that the body, a JSON object, does not have.

        The rest stays byte for byte, and the body is not parsed. Raises BadRequest.
        """
        body = self._body
        self._absent = self._absent and frozenset(n for n in self._absent if b'"%b"' % n not in field)
        if self._json is not _UNREAD:
            if isinstance(self._json, dict):
                self._json = {**orjson.loads(b"{%b}" % field), **self._json}
            if self._stale:
                return
        if body[:2] == b'{"' and len(body) < _COPY_BYTES:
            self._body = b"{%b,%b" % (field, body[1:])
            return
        start = _OBJECT.match(body)
        if start is None:
            raise BadRequest("wanted a JSON object as the body")
        comma = b"" if start[2] == b"}" else b","
        rest = memoryview(body)[start.end(1) :]  # the body may be large: copy it once, not twice
        self._body = b"".join((start[1], field, comma, rest))

    def replace_field(self, old: bytes, new: bytes) -> None:
        """Replace the top-level field ``old``, as :meth:`add_field` has written it, by ``new``.

        The rest stays byte for byte, and the body is not parsed. The first ``old`` in the body must be that field.
        """
        self._body = self.body.replace(old, new, 1)
        if isinstance(self._json, dict):
            self._json = {**self._json, **orjson.loads(b"{%b}" % new)}

    def header(self, name: bytes) -> bytes | None:
        """The first value of header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def _has_escapes(body: bytes) -> bool:
    """Return True when ``body`` may have letters written as escapes, such as ``\\u0073``."""
    return b"\\" in body and b"\\u00" in body


def _as_numpy(value: Any) -> Any:
    from slime_fairness.large_json import as_numpy  # imports numpy, which not every router needs

    return as_numpy(value)


def _not_written(error: orjson.JSONEncodeError) -> Exception:
    if "ecursion" not in str(error):
        return UnwritableBody(str(error))
    return BadRequest("the body is nested too deeply: at most 254 levels can be passed on")
