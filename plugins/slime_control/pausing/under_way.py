"""Generations that are with the engines now, and the names under which an engine can end them.

SGLang ends a request by its ``rid``, and all whose rids begin with what is named; a string on a batch becomes
``{rid}_0``, ``{rid}_1``, ... Requests that bring no name get one, so that each can be ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

import orjson

from router_core import Exchange, Worker
from router_core.errors import BadRequest
from router_core.request import Request
from slime_sglang.aborts import check_rid

__all__ = ["UnderWay", "renamed_by_the_engine", "rids_of"]

#: Whose bodies have a ``rid`` (SGLang: ``GenerateReqInput``, and ``protocol.py`` of its OpenAI endpoints).
_NAMED = frozenset((b"/generate", b"/v1/chat/completions", b"/v1/completions"))
_NAMED_PATHS = frozenset(path.decode() for path in _NAMED)
_OURS = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"rid":"([0-9a-f]{32})"')


class UnderWay:
    """Changed only by functions without ``await``: one event loop needs no lock. ``open``: all exchanges of now.

    ``name`` costs a search of the body and a copy of it; it parses, and remembers, only what brings a ``rid`` of its
    own. Names that it gave are found in the bodies, when somebody asks for one.
    """

    def __init__(self, open: Callable[[], Iterable[Exchange]]) -> None:
        self._open = open
        self._by_name: dict[str, Exchange] = {}
        self._waiting: set[Exchange] = set()
        # Our names: the prefix and a number, all of one length. No name may be the beginning of another one.
        self._numbers = count()
        self._prefix = uuid4().hex[:20]
        self._field = f'"rid":"{self._prefix}%012x"'.encode()
        self._given = re.compile(f'"rid":"{self._prefix}[0-9a-f]{{12}}"'.encode())

    def name(self, exchange: Exchange) -> None:
        """``exchange`` begins, under the name that it has or gets. Raises BadRequest for one that is too long."""
        request = exchange.request
        if _has_rid(request):
            self._keep_name(exchange)
        elif request.target in _NAMED or request.path in _NAMED_PATHS:
            try:
                request.add_field(self._field % next(self._numbers))
            except BadRequest:
                return  # the worker says so in its own words

    def _keep_name(self, exchange: Exchange) -> None:
        """A name is in the body of ``exchange``; for null it gets one."""
        request = exchange.request
        rids = rids_of(request)
        if rids is None and request.path in _NAMED_PATHS:
            field = self._field % next(self._numbers)
            request.replace_json({**request.json(), **orjson.loads(b"{%b}" % field)})
            rids = rids_of(request)
        if rids is None:
            return
        check_rid(rids)
        for name in rids:
            self._by_name[name] = exchange
        exchange.on_close(partial(self._ended, rids, exchange))

    def rename(self, request: Request) -> bool:
        """Give ``request`` a new name in place of one that :meth:`name` gave it. True when it had such a name."""
        given = self._given.search(request.body)
        if given is None:
            return False
        request.replace_field(given[0], self._field % next(self._numbers))
        return True

    def _ended(self, names: list[str], exchange: Exchange) -> None:
        for name in names:
            if self._by_name.get(name) is exchange:
                del self._by_name[name]

    def ends_others(self, rid: str, own: Collection[str]) -> bool:
        """Return True when an abort of ``rid``, of a request with these ``own`` names, would end another too."""
        return any(name.startswith(rid) and name not in own for name in self._by_name)

    def workers(self, prefix: str) -> list[Worker] | None:
        """The workers with a request that ``prefix`` ends; None when no such request is known."""
        found = list(self._matching(prefix))
        if not found:
            return None
        return list(dict.fromkeys(worker for exchange in found for worker in exchange.workers))

    @contextmanager
    def waiting(self, exchange: Exchange) -> Iterator[None]:
        """``exchange`` has a worker, which is not asked yet."""
        self._waiting.add(exchange)
        try:
            yield
        finally:
            self._waiting.discard(exchange)

    def give_up(self, prefix: str) -> None:
        """Begin nothing more for the requests that ``prefix`` ends, all of them, and that no worker is asked now."""
        for exchange in self._matching(prefix):
            rids = rids_of(exchange.request) or []
            asked = exchange.workers and exchange not in self._waiting
            if not asked and all(rid.startswith(prefix) for rid in rids):
                exchange.hang_up()

    def _matching(self, prefix: str) -> Iterator[Exchange]:
        for name, exchange in self._names(prefix):
            # The second: one sequence of a batch.
            if name.startswith(prefix) or prefix.startswith(f"{name}_"):
                yield exchange

    def _names(self, prefix: str) -> Iterator[tuple[str, Exchange]]:
        """All names, but without ours when ``prefix`` can be none of them."""
        yield from self._by_name.items()
        if prefix.startswith(self._prefix) or self._prefix.startswith(prefix):
            for exchange in self._open():
                ours = _OURS.match(exchange.request.body)
                if ours is not None:
                    yield ours[1].decode(), exchange


def _has_rid(request: Request) -> bool:
    """True when the body of ``request``, a JSON object, has a ``rid``, null perhaps."""
    if not request.may_have(b"rid"):
        return False
    try:
        document: Any = request.json()
    except BadRequest:
        return False
    return isinstance(document, dict) and "rid" in document


def rids_of(request: Request) -> list[str] | None:
    """The names that ``request`` brings; None: it has none, and may get one."""
    ours = _OURS.match(request.body)
    if ours is not None:
        return [ours[1].decode()]
    if not request.may_have(b"rid"):
        return None
    try:
        document: Any = request.json()
    except BadRequest:
        return []
    if not isinstance(document, dict):
        return []
    rid = document.get("rid")
    if rid is None:
        return None
    rids = rid if isinstance(rid, list) else [rid]
    if set(map(type, rids)) == {str} and all(rids):
        return rids
    return [each for each in rids if isinstance(each, str) and each]


def renamed_by_the_engine(request: Request) -> bool:
    """True when the engine gives its sequences other names (``n`` above 1), so that nobody can end them by these."""
    if not request.may_have(b"n"):
        return False
    try:
        document: Any = request.json()
    except BadRequest:
        return False
    if not isinstance(document, dict):
        return False
    sampling = document.get("sampling_params")
    places = sampling if isinstance(sampling, list) else [sampling, document]
    counts = [place.get("n") for place in places if isinstance(place, dict)]
    return any(isinstance(number, int) and number > 1 for number in counts)
