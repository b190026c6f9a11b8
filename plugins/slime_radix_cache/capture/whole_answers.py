"""Unstreamed answers: resumed if an engine aborted them, and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from functools import partial
from typing import Any

import anyio
import orjson

from router_core.exchange import Exchange
from router_core.reply import BodySource, Reply
from router_core.request import LARGE_BYTES, Request
from slime_fairness.large_json import parse
from slime_fairness.turns import FairTurns
from slime_radix_cache.capture.growing_response import GrowingResponse
from slime_radix_cache.capture.relayed_answer import RELAYED_BYTES, RelayedAnswer
from slime_radix_cache.capture.requests import GenerationRequest, request_for_one
from slime_radix_cache.capture.turns import PromptTurn, Turns
from slime_resume.generation import Generation
from slime_resume.resumed_answer import resume_answer
from slime_sglang import is_aborted
from slime_sglang.array_cutter import ArrayCutter
from slime_sglang.bodies import keep_parsed, parsed

__all__ = ["WholeAnswers"]


class WholeAnswers:
    """Records an answer that is not streamed.

    ``turns[i]``: the prompt of sequence ``i``; ``generation`` resumes aborted sequences.
    """

    def __init__(
        self,
        recorder: Turns,
        exchange: Exchange,
        wanted: GenerationRequest,
        turns: list[PromptTurn],
        generation: Generation | None,
        long_work: FairTurns,
    ) -> None:
        self._recorder = recorder
        self._exchange = exchange
        self._wanted = wanted
        self._turns = turns
        self._generation = generation
        self._long_work = long_work
        self._keeps_rows = recorder.rows.store is not None
        #: True also if the answer may be resumed: the arrays of all its attempts are joined.
        self._keeps_arrays = self._keeps_rows or generation is not None

    async def pass_on(self, reply: Reply) -> bool:
        """Read, resume and record ``reply``. Raises the errors of reading it.

        If the reply is no answer, or has a wrong number of sequences, all sequences count as lost. A large answer with
        one sequence that will not be resumed is not read here: it is passed on while it comes, and recorded before its
        last piece is passed on. Returns True for such an answer, else False.
        """
        is_large = reply.body is None and _size(reply) >= RELAYED_BYTES
        if is_large and len(self._turns) == 1 and await self._relay(reply):
            return True
        body = await reply.read()
        read = await self._read(self._parsed(body))
        if read is None:
            return False
        answer, answers = read
        generation = self._generation
        aborted = [number for number, each in enumerate(answers) if is_aborted(each)] if generation else []
        await self._record(answers, set(aborted))
        if generation is None or not aborted:
            if self._exchange.parent is not None:
                keep_parsed(self._exchange, body, answer)  # the plugin that made this request reads it next
            return False
        if isinstance(answer, list):
            answers = orjson.loads(body)  # again, now with all arrays: the client gets the whole list
            await self._resume_some(answers, aborted, generation)
            reply.replace_body(orjson.dumps(answers))
        else:
            better = await self._resumed(0, answer, generation)
            if better is not None:
                reply.replace_body(better)
        return False

    async def _relay(self, reply: Reply) -> bool:
        headers = reply.headers
        cutter = ArrayCutter(keeps=self._keeps_rows, array_bytes=_size(reply))
        answer: RelayedAnswer | None = None

        def relayed(source: BodySource) -> RelayedAnswer:
            nonlocal answer
            lose = partial(self._recorder.lose, self._turns)
            answer = RelayedAnswer(source, cutter, self._record_relayed, lose, self._fail)
            return answer

        reply.pass_through(relayed)
        reply.headers = headers  # pass_through dropped the Content-Length, but the body does not change
        assert answer is not None  # narrowing: there was no body yet
        if self._generation is not None and not await answer.is_ended():
            return False
        answer.relay()
        return True

    async def _record_relayed(self, cutter: ArrayCutter) -> None:
        try:
            read = await self._read(self._cut(cutter))
            if read is not None:
                await self._record(read[1], ())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception, answers: Sequence[Any] = ()) -> None:
        worker = self._exchange.worker
        self._recorder.fail(self._turns, error, worker.url if worker is not None else None, answers)

    async def _read(self, document: Awaitable[Any]) -> tuple[Any, list[Any]] | None:
        """Return the answer, which is the parsed ``document``, and the list of its sequences.

        If ``document`` is no answer to the request, count this, mark the sequences as lost, and return None.
        """
        try:
            answer = await document
        except Exception as error:
            self._fail(error)
            return None
        except BaseException:
            self._recorder.lose(self._turns)
            raise
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(self._turns):
            self._fail(ValueError(f"wanted {len(self._turns)} sequences, got {len(answers)}"), answers)
            return None
        return answer, answers

    async def _parsed(self, body: bytes) -> Any:
        if len(body) < LARGE_BYTES:
            return parsed(body, keeps_arrays=self._keeps_arrays)
        cutter = ArrayCutter(keeps=self._keeps_arrays)
        breaks = self._long_work.breaks(self._exchange.client)
        for start in range(0, len(body), LARGE_BYTES):
            await breaks.take()
            cutter.feed(memoryview(body)[start : start + LARGE_BYTES])
        return await self._cut(cutter)

    async def _cut(self, cutter: ArrayCutter) -> Any:
        """Return the parsed document whose bytes ``cutter`` has taken."""
        steps = parse(cutter.json(), is_limited=False, packs=False)
        return cutter.put_back(await self._long_work.run(steps, self._exchange.client))

    async def _record(self, answers: list[Any], aborted: Collection[int]) -> None:
        """Record ``answers``, without those numbered in ``aborted``. Take breaks for the work of other clients."""
        breaks = self._long_work.breaks(self._turns[0].client)
        for number, (turn, answer) in enumerate(zip(self._turns, answers, strict=True)):
            try:
                await breaks.take()
            except asyncio.CancelledError:
                self._recorder.lose(self._turns[number:], answers[number:])
                raise
            if number not in aborted:
                self._recorder.record(turn, answer)

    async def _resume_some(self, answers: list[Any], aborted: list[int], generation: Generation) -> None:
        """Resume each sequence in ``answers`` whose number is in ``aborted``, and put the new answer in its place.

        Each sequence is resumed by a request of its own. A sequence that cannot be resumed stays.
        """
        asked = self._exchange.request
        self._exchange.release()

        async def resume(number: int) -> None:
            request = Request(asked.method, asked.target, asked.headers)
            request.replace_json(request_for_one(asked.json(), self._wanted, number))
            with Exchange(request, session=self._exchange.session, parent=self._exchange) as own:
                better = await self._resumed(number, answers[number], generation.of_one(own))
                if better is not None:
                    answers[number] = orjson.loads(better)

        async with anyio.create_task_group() as tasks:
            for number in aborted:
                tasks.start_soon(resume, number)

    async def _resumed(self, number: int, aborted: Any, generation: Generation) -> bytes | None:
        """Return the answer that replaces ``aborted``, as JSON; None if ``aborted`` stays. Record every attempt."""
        response = GrowingResponse(self._recorder, self._turns[number])
        grows = generation.goes_on

        def record(answer: Any, doubt: str | None) -> None:
            if not grows:
                response.begin_anew()
            response.record(answer, doubt)

        def fail(error: ValueError, *answers: Any) -> None:
            self._recorder.fail([self._turns[number]], error, None, answers)

        try:
            return await resume_answer(generation, aborted, record, fail)
        except ValueError as error:  # the other sequences continue
            fail(error, aborted)
            return None


def _size(reply: Reply) -> int:
    """Return the Content-Length of ``reply``; 0 without that header."""
    size = reply.header(b"content-length")
    return int(size) if size is not None and size.isdigit() else 0
