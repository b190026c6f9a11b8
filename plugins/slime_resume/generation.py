"""Aborted generations: done again, or continued, before the client hears of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson

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
from slime_resume.retries import NoUse, Retries
from slime_resume.stop_conditions import StopConditions
from slime_sglang import is_aborted, read_event, sampled_ids
from slime_sglang.bodies import EVENTS, JSON, media_type, parsed

__all__ = ["Aborts", "Generation", "Resumed"]

T = TypeVar("T")


class Resumed(NamedTuple):
    """An answer instead of an aborted one, and encoded. ``doubt``: why it is no evidence, None if it may be."""

    answer: dict[str, Any]
    body: bytes
    doubt: str | None


class Aborts:
    """Makes a Generation of each request that may be tried again. ``resume``: go on from what was sampled."""

    def __init__(
        self,
        router: Router,
        interruptions: Interruptions,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        spelling: Spelling,
        tally: Tally,
        *,
        count: int,
        wait_s: float,
        resume: bool,
    ) -> None:
        self.router = router
        self.interruptions = interruptions
        self.tokenizer = tokenizer
        self.stop_conditions = StopConditions(tokenizer, eos_ids)
        self.spelling = spelling
        self.tally = tally
        self.retries = Retries(count, wait_s, interruptions)
        self._count = count
        self._resume = resume

    def begin(self, exchange: Exchange, rid: Any) -> Generation | None:
        """Begin the generation of ``exchange``, named ``rid``; None when aborts are passed on."""
        if not self._count:
            return None
        watch = self.interruptions.watch([rid] if isinstance(rid, str) else ())
        exchange.on_close(partial(self.interruptions.forget, watch))
        return Generation(self, exchange, watch, time.monotonic(), resume=self._resume)


class Generation:
    """One response on its way, in as many attempts as it takes.

    Between attempts no worker is leased and no connection held. Cancellation may come anywhere: the exchange
    gives the lease back, and whoever has a reply closes it.
    """

    def __init__(
        self, aborts: Aborts, exchange: Exchange, watch: Watch, began: float, *, resume: bool
    ) -> None:
        self._aborts = aborts
        self._exchange = exchange
        self._resume = resume
        self._began = began
        self._watch = watch

    def of_one(self, exchange: Exchange) -> Generation:
        """The same for one sequence of several, which ``exchange`` asks for alone. It must not outlive this one."""
        rid = exchange.request.json().get("rid")
        own = Watch(self._watch.asked, self._watch.paused, [rid] if isinstance(rid, str) else ())
        return Generation(self._aborts, exchange, own, self._began, resume=self._resume)

    @property
    def goes_on(self) -> bool:
        """True when the tokens of an aborted attempt are kept, and the next one continues from them."""
        return self._resume and can_go_on(self._exchange.request.json())

    def merge(self, output: dict[str, Any]) -> MergedResponse:
        """A response that begins with ``output``, an aborted one, and is empty when it has to begin anew.

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
            aborts.tally.aborted("completed")
        return merged

    def _was_asked(self, aborted: dict[str, Any]) -> bool:
        """True when a client asked for this abort through the router, or no client waits for another answer."""
        if self._exchange.client_disconnected:
            return True
        rid = aborted["meta_info"].get("id")
        if isinstance(rid, str):
            self._watch.rids.add(rid)
        return self._aborts.interruptions.was_asked(self._watch)

    async def finish(
        self, output: dict[str, Any], keep: Callable[[dict[str, Any], str | None], None]
    ) -> Resumed | None:
        """The answer to give instead of ``output``, which was aborted; None when there is none.

        ``keep`` is called with each aborted answer that has tokens, since they are a fact, and a doubt about it.
        """
        merged = self.merge(output) if self.goes_on else None
        if merged is not None and merged.ended:
            return _resumed(merged)
        better: Resumed | None = None

        async def attempt() -> bool | None:
            nonlocal better
            body = await self._whole_answer(merged)
            if body is None:
                return None
            try:
                answer = read_event(parsed(body))
                ids = sampled_ids(answer)
                if merged is not None:
                    merged.begin()
                    news = merged.take(answer)
            except ValueError as error:
                self._aborts.tally.unrecorded("answer_not_understood", error)
                return None
            if merged is None:
                better = Resumed(answer, body, None)
                progress = not is_aborted(answer)
                if not progress and ids:
                    keep(answer, None)
            else:
                progress = news > 0 or not is_aborted(answer)
                better = _resumed(merged)
            return progress or None

        latest = output
        while is_aborted(latest):
            if sampled_ids(latest):
                keep(latest, merged.doubt() if merged is not None else None)
            going_on = merged is not None and bool(merged.ids)
            if await self.try_again(latest, attempt, at_once=going_on) is None:
                break
            assert better is not None  # narrowing: an attempt has succeeded
            latest = better.answer
        return better

    async def _whole_answer(self, merged: MergedResponse | None) -> bytes | None:
        reply = await self.ask_again(*((merged.ids, merged.rid) if merged is not None else ((), None)))
        if reply is None:
            return None
        try:
            return await reply.read()
        except HTTPError:
            return None
        finally:
            self.rest(reply)

    def rest(self, reply: Reply) -> None:
        """``reply`` is of no use any more: nothing is held until the next attempt."""
        reply.close()
        self._exchange.release()

    async def try_again(
        self, aborted: dict[str, Any], attempt: Callable[[], Awaitable[T | None]], *, at_once: bool
    ) -> T | None:
        """Let ``attempt`` be made as often as :class:`Retries` say; None when nothing came of it.

        ``at_once``: it goes on from tokens, so there is no need to wait.
        """
        self._exchange.release()
        if self._was_asked(aborted):
            self._aborts.tally.aborted("passed_on")
            return None
        result = await self._aborts.retries.run(self._watch, attempt, at_once=at_once)
        outcome = "resumed" if at_once else "tried_again"
        self._aborts.tally.aborted(outcome if result is not None else "passed_on")
        return result

    async def ask_again(self, sampled: Sequence[int], rid: str | None) -> Reply | None:
        """A worker's answer to the request, continued behind ``sampled`` as ``rid``; None when there was none.

        The caller closes it. Raises NoUse.
        """
        if self._exchange.client_disconnected:
            raise NoUse
        request = self._exchange.request
        if sampled:
            document = continuation(request.json(), sampled, rid)
            request = Request(request.method, request.target, request.headers)
            request.replace_json(document)
        try:
            reply = await self._aborts.router.ask_again(self._exchange, request)
        except HTTPError:
            return None
        worker = self._exchange.worker
        if (
            worker is not None and worker.passthrough
        ):  # it may speak any protocol, and has just taken others' place
            self.rest(reply)
            raise NoUse
        wanted = EVENTS if request.json().get("stream") else JSON
        if reply.status == 200 and media_type(reply) == wanted:
            return reply
        self.rest(reply)
        if reply.status != 200 and reply.status < 500:
            raise NoUse
        return None


def _resumed(merged: MergedResponse) -> Resumed:
    answer = merged.answer()
    return Resumed(answer, orjson.dumps(answer), merged.doubt())
