"""Generations in flight, and the rids by which an engine can abort them.

An abort names a rid, and SGLang aborts all requests whose ``rid`` begins with it. A batch with one ``rid`` gets the
rids ``{rid}_0``, ``{rid}_1``, ... The router gives a rid to a request without one, so that it can be aborted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from uuid import uuid4

import orjson

from router_core import Exchange, Worker
from router_core.errors import BadRequest
from router_core.request import Request
from slime_sglang.aborts import check_rid

__all__ = ["UnderWay", "renamed_by_the_engine", "rids_of"]

#: Paths whose bodies have a ``rid`` (SGLang: ``GenerateReqInput``, and ``protocol.py`` of its OpenAI endpoints).
_RID_TARGETS = frozenset((b"/generate", b"/v1/chat/completions", b"/v1/completions"))
_RID_PATHS = frozenset(path.decode() for path in _RID_TARGETS)
_OURS = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"rid":"([0-9a-f]{32})"')


class UnderWay:
    """Generations by rid. No change of this state has an ``await`` in the middle, so one event loop needs no lock.

    ``open`` returns all open exchanges. :meth:`ensure_rid` parses a body only if it may have a ``rid``, and remembers
    the rids of such a body. A rid that the router adds to a body without ``rid`` is not remembered: for an abort that
    may match the router's rids, the bodies of all open exchanges are searched.
    """

    def __init__(self, open: Callable[[], Iterable[Exchange]]) -> None:
        self._open = open
        self._by_rid: dict[str, Exchange] = {}
        self._waiting: set[Exchange] = set()
        # The router's rids: the prefix and a number, all of one length, so that none is a prefix of another.
        self._numbers = count()
        self._prefix = uuid4().hex[:20]
        self._field = f'"rid":"{self._prefix}%012x"'.encode()
        self._given = re.compile(f'"rid":"{self._prefix}[0-9a-f]{{12}}"'.encode())

    def ensure_rid(self, exchange: Exchange) -> None:
        """Remember the rid of ``exchange``, or give it one. Raises BadRequest for too long or too many rids."""
        request = exchange.request
        if _has_rid(request):
            self._keep_rids(exchange)
        elif request.target in _RID_TARGETS or request.path in _RID_PATHS:
            try:
                request.add_field(self._field % next(self._numbers))
            except BadRequest:
                return  # the worker answers with its own error

    def _keep_rids(self, exchange: Exchange) -> None:
        """Remember the rids in the body of ``exchange``; add one in place of null. Raises BadRequest."""
        request = exchange.request
        rids = rids_of(request)
        if rids is None and request.path in _RID_PATHS:
            field = self._field % next(self._numbers)
            request.replace_json({**request.json(), **orjson.loads(b"{%b}" % field)})
            rids = rids_of(request)
        if rids is None:
            return
        check_rid(rids)
        for rid in rids:
            self._by_rid[rid] = exchange
        exchange.on_close(partial(self._ended, rids, exchange))

    def rename(self, request: Request) -> bool:
        """Replace the rid that :meth:`ensure_rid` gave to ``request``. Returns False when it has no such rid."""
        given = self._given.search(request.body)
        if given is None:
            return False
        request.replace_field(given[0], self._field % next(self._numbers))
        return True

    def _ended(self, rids: list[str], exchange: Exchange) -> None:
        for rid in rids:
            if self._by_rid.get(rid) is exchange:
                del self._by_rid[rid]

    def ends_others(self, rid: str, own: Collection[str]) -> bool:
        """Return True when an abort of ``rid`` would also end a request other than the one with the rids ``own``.

        Only remembered rids are looked at.
        """
        return any(other.startswith(rid) and other not in own for other in self._by_rid)

    def workers(self, prefix: str) -> list[Worker] | None:
        """Return the workers with a request that an abort of ``prefix`` ends; None when no such request is known."""
        found = list(self._matching(prefix))
        if not found:
            return None
        return list(dict.fromkeys(worker for exchange in found for worker in exchange.workers))

    @contextmanager
    def waiting(self, exchange: Exchange) -> Iterator[None]:
        """Mark ``exchange``, within the ``with``, as one that has leased a worker but was not sent to it yet."""
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
        for rid, exchange in self._rids(prefix):
            # The second condition: ``prefix`` is the rid of one sequence of a batch.
            if rid.startswith(prefix) or prefix.startswith(f"{rid}_"):
                yield exchange

    def _rids(self, prefix: str) -> Iterator[tuple[str, Exchange]]:
        """Yield all rids of clients, and the router's own rids if ``prefix`` may match them."""
        yield from self._by_rid.items()
        if prefix.startswith(self._prefix) or self._prefix.startswith(prefix):
            for exchange in self._open():
                ours = _OURS.match(exchange.request.body)
                if ours is not None:
                    yield ours[1].decode(), exchange


def _has_rid(request: Request) -> bool:
    """Return True when the body of ``request`` is a JSON object with a ``rid``, which may be null."""
    return request.may_have(b"rid") and "rid" in (request.json_object_or_none() or {})


def rids_of(request: Request) -> list[str] | None:
    """Return the valid rids of ``request``; None if its ``rid`` is missing or null, so that the router may add one."""
    ours = _OURS.match(request.body)
    if ours is not None:
        return [ours[1].decode()]
    if not request.may_have(b"rid"):
        return None
    document = request.json_object_or_none()
    if document is None:
        return []
    rid = document.get("rid")
    if rid is None:
        return None
    rids = rid if isinstance(rid, list) else [rid]
    if set(map(type, rids)) == {str} and all(rids):
        return rids
    return [each for each in rids if isinstance(each, str) and each]


def renamed_by_the_engine(request: Request) -> bool:
    """Return True when the engine gives each sequence of ``request`` a new rid, since ``n`` is above 1.

    The rids of ``request`` then abort no sequence.
    """
    if not request.may_have(b"n"):
        return False
    document = request.json_object_or_none()
    if document is None:
        return False
    sampling = document.get("sampling_params")
    places = sampling if isinstance(sampling, list) else [sampling, document]
    counts = [place.get("n") for place in places if isinstance(place, dict)]
    return any(isinstance(number, int) and number > 1 for number in counts)
