"""Generations in flight, and the rids by which an engine can abort them.

SGLang aborts all requests whose ``rid`` begins with the given one. A batch with one ``rid`` gets the rids ``{rid}_0``,
``{rid}_1``, ... Requests without a rid get one, so that each can be aborted. A "name" below is a rid.
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

#: Paths whose bodies have a ``rid`` (SGLang: ``GenerateReqInput``, and ``protocol.py`` of its OpenAI endpoints).
_NAMED = frozenset((b"/generate", b"/v1/chat/completions", b"/v1/completions"))
_NAMED_PATHS = frozenset(path.decode() for path in _NAMED)
_OURS = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"rid":"([0-9a-f]{32})"')


class UnderWay:
    """Generations by rid. Changed only by functions without ``await``: one event loop needs no lock.

    ``open`` returns all open exchanges. :meth:`name` parses only a body that has a ``rid``, and remembers that rid.
    A rid that the router gave is not remembered: an abort that may match one searches the bodies for it.
    """

    def __init__(self, open: Callable[[], Iterable[Exchange]]) -> None:
        self._open = open
        self._by_name: dict[str, Exchange] = {}
        self._waiting: set[Exchange] = set()
        # The router's rids: the prefix and a number, all of one length, so that none is a prefix of another.
        self._numbers = count()
        self._prefix = uuid4().hex[:20]
        self._field = f'"rid":"{self._prefix}%012x"'.encode()
        self._given = re.compile(f'"rid":"{self._prefix}[0-9a-f]{{12}}"'.encode())

    def name(self, exchange: Exchange) -> None:
        """Remember the rid of ``exchange``, or give it one. Raises BadRequest for too long or too many rids."""
        request = exchange.request
        if _has_rid(request):
            self._keep_name(exchange)
        elif request.target in _NAMED or request.path in _NAMED_PATHS:
            try:
                request.add_field(self._field % next(self._numbers))
            except BadRequest:
                return  # the worker answers with its own error

    def _keep_name(self, exchange: Exchange) -> None:
        """Remember the rids in the body of ``exchange``; add one in place of null. Raises BadRequest."""
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
        """Return True when an abort of ``rid`` would end another request than the one with the ``own`` rids."""
        return any(name.startswith(rid) and name not in own for name in self._by_name)

    def workers(self, prefix: str) -> list[Worker] | None:
        """The workers with a request that ``prefix`` ends; None when no such request is known."""
        found = list(self._matching(prefix))
        if not found:
            return None
        return list(dict.fromkeys(worker for exchange in found for worker in exchange.workers))

    @contextmanager
    def waiting(self, exchange: Exchange) -> Iterator[None]:
        """Note that ``exchange`` has leased a worker, but was not sent to it yet."""
        self._waiting.add(exchange)
        try:
            yield
        finally:
            self._waiting.discard(exchange)

    def give_up(self, prefix: str) -> None:
        """End the requests that are at no worker now and whose rids all begin with ``prefix``."""
        for exchange in self._matching(prefix):
            rids = rids_of(exchange.request) or []
            asked = exchange.workers and exchange not in self._waiting
            if not asked and all(rid.startswith(prefix) for rid in rids):
                exchange.hang_up()

    def _matching(self, prefix: str) -> Iterator[Exchange]:
        for name, exchange in self._names(prefix):
            # The second condition: ``prefix`` is the rid of one sequence of a batch.
            if name.startswith(prefix) or prefix.startswith(f"{name}_"):
                yield exchange

    def _names(self, prefix: str) -> Iterator[tuple[str, Exchange]]:
        """Yield all rids, but the router's own only when ``prefix`` may match them."""
        yield from self._by_name.items()
        if prefix.startswith(self._prefix) or self._prefix.startswith(prefix):
            for exchange in self._open():
                ours = _OURS.match(exchange.request.body)
                if ours is not None:
                    yield ours[1].decode(), exchange


def _has_rid(request: Request) -> bool:
    """Return True when the body of ``request`` is a JSON object with a ``rid``, which may be null."""
    if not request.may_have(b"rid"):
        return False
    try:
        document: Any = request.json()
    except BadRequest:
        return False
    return isinstance(document, dict) and "rid" in document


def rids_of(request: Request) -> list[str] | None:
    """Return the rids of ``request``, except invalid ones; None: it has no rid, and may get one."""
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
    """Return True when the engine gives the sequences new rids (``n`` above 1): no rid of ``request`` aborts them."""
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
