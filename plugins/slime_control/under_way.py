"""Generations that are with the engines now, and the names under which an engine can end them.

SGLang ends a request by its ``rid``, and all whose rids begin with what is named; a string on a batch becomes
``{rid}_0``, ``{rid}_1``, ... Requests that bring no name get one, so that each can be ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from typing import Any
from uuid import uuid4

import orjson

from router_core import Exchange, Worker
from router_core.errors import BadRequest
from router_core.exchange import Request

__all__ = ["UnderWay", "renamed_by_the_engine", "rids_of"]

#: Whose bodies have a ``rid`` (SGLang: ``GenerateReqInput``, and ``protocol.py`` of its OpenAI endpoints).
_NAMED = frozenset((b"/generate", b"/v1/chat/completions", b"/v1/completions"))
_NAMED_PATHS = frozenset(path.decode() for path in _NAMED)
_OURS = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"rid":"([0-9a-f]{32})"')


class UnderWay:
    """Changed only by functions without ``await``: one event loop needs no lock.

    ``name`` costs a search of the body and a copy of it, and parses only what brings a ``rid`` of its own.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Exchange] = {}
        # Our names: the prefix and a number, all of one length. No name may be the beginning of another one.
        self._by_number: dict[int, Exchange] = {}
        self._numbers = count()
        self._prefix = uuid4().hex[:20].encode()

    def __len__(self) -> int:
        return len(self._by_name) + len(self._by_number)

    def name(self, exchange: Exchange) -> None:
        """``exchange`` begins, under the name that it has or gets."""
        request = exchange.request
        brought = b'"rid"' in request.body
        rids = rids_of(request) if brought else None
        if rids is not None:
            for name in rids:
                self._by_name[name] = exchange
            exchange.on_close(partial(self._ended, rids, exchange))
        elif request.target in _NAMED or request.path in _NAMED_PATHS:
            number = next(self._numbers)
            field = b'"rid":"%b%012x"' % (self._prefix, number)
            try:
                if brought and "rid" in request.json():  # null
                    request.replace_json({**request.json(), **orjson.loads(b"{%b}" % field)})
                else:
                    request.add_field(field)
            except BadRequest:
                return  # the worker says so in its own words
            self._by_number[number] = exchange
            exchange.on_close(partial(self._by_number.pop, number))

    def _ended(self, names: list[str], exchange: Exchange) -> None:
        for name in names:
            if self._by_name.get(name) is exchange:
                del self._by_name[name]

    def workers(self, prefix: str) -> list[Worker] | None:
        """The workers with a request that ``prefix`` ends; None when no such request is known."""
        found = list(self._matching(prefix))
        if not found:
            return None
        return list(dict.fromkeys(worker for exchange in found for worker in exchange.workers))

    def give_up(self, prefix: str) -> None:
        """Begin nothing more for the requests that ``prefix`` ends and that are with no worker now."""
        for exchange in self._matching(prefix):
            if not exchange.workers:
                exchange.hang_up()

    def _matching(self, prefix: str) -> Iterator[Exchange]:
        ours = ((b"%b%012x" % (self._prefix, number), each) for number, each in self._by_number.items())
        for name, exchange in chain(self._by_name.items(), ((name.decode(), each) for name, each in ours)):
            # The second: one sequence of a batch.
            if name.startswith(prefix) or prefix.startswith(f"{name}_"):
                yield exchange


def rids_of(request: Request) -> list[str] | None:
    """The names that ``request`` brings; None: it has none, and may get one."""
    ours = _OURS.match(request.body)
    if ours is not None:
        return [ours[1].decode()]
    if b'"rid"' not in request.body:
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
    return [each for each in rids if isinstance(each, str) and each]


def renamed_by_the_engine(request: Request) -> bool:
    """True when the engine gives its sequences other names (``n`` above 1), so that nobody can end them by these."""
    if b'"n"' not in request.body:
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
