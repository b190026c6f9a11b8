"""Aborted generations: done again, or continued, before the client hears of it."""

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
    """Another attempt will not help: no client waits for it, or a worker refuses the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """Makes a Generation of each request that may be tried again: ``count`` times, after ``wait_s``.

    ``resume``: it goes on from what was sampled.
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
        """Begin the generation of ``exchange``, named ``rid``; None when aborts are passed on."""
        if not self.count:
            return None
        watch = self.interruptions.watch([rid] if isinstance(rid, str) else ())
        exchange.on_close(partial(self.interruptions.forget, watch))
        return Generation(self, exchange, watch, time.monotonic())


class Generation:
    """One response on its way, in as many attempts as it takes.

    Between attempts no worker is leased and no connection held. Cancellation may come anywhere: the exchange
    gives the lease back, and whoever has a reply closes it.
    """

    def __init__(self, aborts: Aborts, exchange: Exchange, watch: Watch, began: float) -> None:
        self.tally = aborts.tally
        self._aborts = aborts
        self._exchange = exchange
        self._began = began
        self._watch = watch

    def of_one(self, exchange: Exchange) -> Generation:
        """The same for one sequence of several, which ``exchange`` asks for alone. It must not outlive this one."""
        rid = exchange.request.json().get("rid")
        own = Watch(self._watch.asked, self._watch.paused, [rid] if isinstance(rid, str) else ())
        return Generation(self._aborts, exchange, own, self._began)

    @property
    def goes_on(self) -> bool:
        """True when the tokens of an aborted attempt are kept, and the next one continues from them."""
        return self._aborts.resume and can_go_on(self._exchange.request.json())

    def merge(self, output: dict[str, Any]) -> MergedResponse:
        """A response that begins with ``output``, an aborted one that has tokens.

        It has ended when the abort came with its last token.
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
        """True when a client asked for this abort through the router, or no client waits for another answer."""
        if self._exchange.client_disconnected:
            return True
        rid = aborted["meta_info"].get("id")
        if isinstance(rid, str):
            self._watch.rids.add(rid)
        return self._aborts.interruptions.was_asked(self._watch)

    def rest(self, reply: Reply) -> None:
        """``reply`` is of no use any more: nothing is held until the next attempt."""
        reply.close()
        self._exchange.release()

    async def resume(
        self,
        aborted: dict[str, Any],
        merged: MergedResponse | None,
        attempt: Callable[[Reply], Awaitable[bool]],
    ) -> bool:
        """Make attempts until one brings the response further than ``aborted``; False when none does.

        They go on from ``merged``, if there is one. ``attempt`` reads a reply, and returns True when it
        brought something. Raises HTTPError when one breaks off in the middle, as any reply may.
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
        """As :meth:`resume`; ``at_once``: without a wait before the first attempt, unless the engines are paused."""
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
            self.rest(reply)
        logger.warning("a generation was aborted %d times in a row; its last answer stands", count + 1)
        return False

    async def _ask_again(self, merged: MergedResponse | None) -> Reply | None:
        """A worker's answer to the request, continued behind ``merged``, if there is that; None when there was none.

        The caller closes it. Raises _NoUse.
        """
        if self._exchange.client_disconnected:
            raise _NoUse
        request = self._exchange.request
        if merged is not None:
            document = continuation(request.json(), merged.ids, merged.rid)
            request = Request(request.method, request.target, request.headers)
            request.replace_json(document)
        try:
            reply = await self._aborts.router.ask_again(self._exchange, request)
        except HTTPError:
            return None
        worker = self._exchange.worker
        if worker is not None and worker.passthrough:
            self.rest(reply)  # it may speak any protocol, and has just taken others' place
            raise _NoUse
        wanted = EVENTS if request.json().get("stream") else JSON
        if reply.status == 200 and media_type(reply) == wanted:
            return reply
        self.rest(reply)
        if reply.status != 200 and reply.status < 500:
            raise _NoUse
        return None
