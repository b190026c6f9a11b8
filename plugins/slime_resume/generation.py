"""Aborted generations, which are retried or continued before the client sees the abort."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from router_core.errors import HTTPError
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.router import Router
from router_core.types import Tokenizer
from slime_resume.continuation import can_go_on, continuation
from slime_resume.contracts import Spelling, Tally
from slime_resume.interruptions import Interruptions, Watch
from slime_resume.response_merger import MergedResponse
from slime_resume.stop_conditions import StopConditions
from slime_sglang.bodies import EVENTS, JSON, media_type

__all__ = ["Aborts", "Generation"]

logger = logging.getLogger(__name__)


class _NoUse(Exception):
    """Another attempt will not help: no client waits, the worker refused the request, or the worker is passthrough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """Makes the Generation of a request.

    After an abort, up to ``count`` further attempts are made. Before each attempt is a wait of ``wait_s`` seconds; if a
    pause explains the abort, the wait ends with the pause. If attempts continue from tokens, the first of them waits
    only for the end of a pause. ``resume``: attempts continue from the tokens sampled so far, if they can.
    """

    router: Router
    interruptions: Interruptions
    tokenizer: Tokenizer
    stop_conditions: StopConditions
    spelling: Spelling
    tally: Tally
    count: int
    wait_s: float
    resume: bool

    def begin(self, exchange: Exchange, rid: Any) -> Generation | None:
        """Begin the generation of ``exchange``, whose request has ``rid``. Return None if aborts are passed on."""
        if not self.count:
            return None
        watch = self.interruptions.watch([rid] if isinstance(rid, str) else ())
        exchange.on_close(partial(self.interruptions.forget, watch))
        return Generation(self, exchange, watch, time.monotonic())


class Generation:
    """One response, made in one or more attempts.

    Between attempts no worker is leased, and no connection is held. Cancellation may come anywhere: the exchange
    returns the lease, and the reader of a reply closes the reply.
    """

    def __init__(self, aborts: Aborts, exchange: Exchange, watch: Watch, began: float) -> None:
        self.tally = aborts.tally
        self._aborts = aborts
        self._exchange = exchange
        self._began = began
        self._watch = watch

    def of_one(self, exchange: Exchange) -> Generation:
        """Return the Generation of ``exchange``, which generates one sequence of this request.

        The Generation must not outlive ``self``.
        """
        rid = exchange.request.json().get("rid")
        own = Watch(self._watch.asked, self._watch.paused, [rid] if isinstance(rid, str) else ())
        return Generation(self._aborts, exchange, own, self._began)

    @property
    def goes_on(self) -> bool:
        """True when the next attempt continues from the tokens of an aborted attempt."""
        return self._aborts.resume and can_go_on(self._exchange.request.json())

    def merge(self, output: dict[str, Any]) -> MergedResponse:
        """Return a response that begins with ``output``, an aborted answer with tokens.

        The response has ended already if its last token meets a stop condition.
        """
        aborts = self._aborts
        merged = MergedResponse(
            self._exchange.request.json(),
            aborts.tokenizer,
            self._began,
            aborts.stop_conditions,
            aborts.spelling,
            self._was_asked,
        )
        merged.start_with(output)
        if merged.ended:
            self._exchange.release()
            self.tally.aborted("completed")
        return merged

    def _was_asked(self, aborted: dict[str, Any]) -> bool:
        """Return True when a client requested this abort through the router, or the generation's client has gone."""
        if self._exchange.client_disconnected:
            return True
        rid = aborted["meta_info"].get("id")
        if isinstance(rid, str):
            self._watch.rids.add(rid)
        return self._aborts.interruptions.was_asked(self._watch)

    def give_back(self, reply: Reply) -> None:
        """Close ``reply``, and return the lease until the next attempt."""
        reply.close()
        self._exchange.release()

    async def resume(
        self,
        aborted: dict[str, Any],
        merged: MergedResponse | None,
        attempt: Callable[[Reply], Awaitable[bool]],
    ) -> bool:
        """Make attempts until one brings the response further than ``aborted``. Return False if no attempt does.

        The attempts continue ``merged``, if given. ``attempt`` reads a reply, and returns True when the reply brought
        the response further. Raises HTTPError when a reply adds to ``merged`` and then breaks off.
        """
        self._exchange.release()
        going_on = merged is not None
        is_further = False
        if not self._was_asked(aborted):
            with suppress(_NoUse):
                is_further = await self._make_attempts(merged, attempt, at_once=going_on)
        outcome = "resumed" if going_on else "tried_again"
        self.tally.aborted(outcome if is_further else "passed_on")
        return is_further

    async def _make_attempts(
        self, merged: MergedResponse | None, attempt: Callable[[Reply], Awaitable[bool]], *, at_once: bool
    ) -> bool:
        """Make the attempts of :meth:`resume`. ``at_once``: the first attempt waits only for the end of a pause."""
        interruptions, count = self._aborts.interruptions, self._aborts.count
        for number in range(count):
            await interruptions.wait(self._watch, 0 if at_once and not number else self._aborts.wait_s)
            if interruptions.was_asked(self._watch):
                return False
            reply = await self._ask_again(merged)
            if reply is None:
                continue
            if merged is not None:
                merged.begin()
            try:
                if await attempt(reply):
                    return True
            except HTTPError:
                if merged is not None and merged.has_grown:
                    raise
            self.give_back(reply)
        logger.warning("%d attempts did not finish a generation; the client gets the last answer", count + 1)
        return False

    async def _ask_again(self, merged: MergedResponse | None) -> Reply | None:
        """Send the request again, as a continuation of ``merged`` if given. Return the reply, or None if it failed.

        The caller closes the reply. Raises _NoUse.
        """
        if self._exchange.client_disconnected:
            raise _NoUse
        request = self._exchange.request
        if merged is not None:
            document = continuation(request.json(), merged.ids, merged.rid, merged.row_start)
            request = Request(request.method, request.target, request.headers)
            request.replace_json(document)
        try:
            reply = await self._aborts.router.ask_again(self._exchange, request)
        except HTTPError:
            return None
        worker = self._exchange.worker
        if worker is not None and worker.passthrough:
            self.give_back(reply)  # a passthrough worker may speak any protocol
            raise _NoUse
        wanted = EVENTS if request.json().get("stream") else JSON
        if reply.status == 200 and media_type(reply) == wanted:
            return reply
        self.give_back(reply)
        if reply.status != 200 and reply.status < 500:
            raise _NoUse
        return None
