"""The plugin's hooks, which rewrite ``/generate`` requests and record their answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.routing import BaseRoute

from router_core import hookimpl
from router_core.errors import BadRequest, HTTPError, TooManyValues
from router_core.exchange import Exchange
from router_core.router import Router
from router_core.types import Tokenizer
from router_core.weights import WeightUpdate
from slime_journal.fingerprint import fingerprint
from slime_radix_cache.capture.given_prompts import GivenPrompts
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.recorder import StreamRecorder
from slime_radix_cache.capture.requests import (
    MALFORMED,
    GenerationRequest,
    check_size,
    handles_aborts,
    longest_ids,
    read_generation,
    rewritten,
    rids_of,
)
from slime_radix_cache.capture.turns import PromptTurn, Turns
from slime_radix_cache.capture.untouched import is_only_proxied, mark_untouched
from slime_radix_cache.capture.whole_answers import WholeAnswers
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories, StoreFailed
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.journal.trajectory_log import TrajectoryLog
from slime_radix_cache.metrics import offer_metrics
from slime_radix_cache.retrieval.routes import Retrieval
from slime_radix_cache.retrieval.session_list import RecordedSessions
from slime_radix_cache.retrieval.session_turns import SessionTurns
from slime_radix_cache.retrieval.templates import ChatTemplate
from slime_radix_cache.retrieval.verdicts import NOTE, Verdicts
from slime_radix_cache.settings import Settings
from slime_radix_cache.tally import Tally
from slime_radix_cache.tokens.checkpoint import eos_ids, offer_tokenizer
from slime_radix_cache.tokens.encoding import Encoder
from slime_radix_cache.tokens.spelling import Spelling
from slime_resume.generation import Aborts, Generation
from slime_resume.interruptions import Interruptions
from slime_resume.resuming_stream import ResumingStream
from slime_resume.stop_conditions import StopConditions
from slime_sglang.aborts import check_rid
from slime_sglang.bodies import EVENTS, JSON, media_type
from slime_sglang.event_readers import tap_events
from slime_sglang.generation import TOKENISED, generates

__all__ = ["RadixCache"]

logger = logging.getLogger(__name__)

#: A rewritten request with more tokens than this is encoded to JSON in pieces; other requests are served in between.
_MANY_TOKENS = 1 << 15


@dataclass(slots=True)
class _Noted:
    """State of one exchange. ``turns``: one for each prompt; after the answer has come, one for each sequence."""

    wanted: GenerationRequest
    turns: list[PromptTurn]
    generation: Generation | None


class RadixCache:
    """Plugin that sends recorded tokens instead of text, and records the answers of engines.

    A failure to record is counted, logged once per kind, and makes ``exact`` false. The engine's answer is passed on.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tally = Tally()
        self._interruptions = Interruptions()
        self._log: TrajectoryLog | None = None

    @hookimpl
    def setup(self, router: Router) -> None:
        """Load the tokenizer, or take another plugin's tokenizer, and register the components for other plugins."""
        self._router, self._pool, settings = router, router.pool, self._settings
        if settings.hf_checkpoint:
            offer_tokenizer(router.components, settings.hf_checkpoint)
        tokenizer: Tokenizer = router.components.get("tokenizer")
        self._encoder = encoder = Encoder(
            tokenizer,
            add_special_tokens=settings.add_special_tokens,
            max_tokens=settings.max_prompt_tokens,
            threads=router.threads,
        )
        router.components.register("encoder", encoder)
        self._verdicts = Verdicts()
        router.components.register("verdicts", self._verdicts)
        spelling = Spelling(tokenizer, encoder.abilities.lead)
        router.components.register("decode", spelling.text_of)
        limits = Limits(settings.max_tokens, settings.max_bytes, settings.gc_threshold_k)
        around = encoder.abilities.special.around
        if settings.trajectory_log is not None:
            self._log = TrajectoryLog.open(settings.trajectory_log, tokenizer, limits, spelling.cut, around)
            router.components.register("log_directory", self._log.directory)  # for logs of other plugins
        self._trajectories = (
            self._log.trajectories if self._log is not None else Trajectories(limits, spelling.cut, around)
        )
        router.components.register("lost_sessions", self._trajectories.losses)
        self._cold = ColdTrajectories(self._trajectories)
        router.components.register("ownership", self._cold)
        router.components.register("side_records", self._cold.side)
        given_prompts, self._streams = GivenPrompts(encoder, spelling), OpenStreams()
        offer_metrics(router.components.find("metrics"), self._tally, self._trajectories)
        self._turns = Turns(
            self._trajectories, encoder, spelling, given_prompts, self._tally, self._streams, self._cold,
            verbose=settings.verbose,
        )  # fmt: skip
        self.retrieval = Retrieval(
            self._trajectories, encoder, ChatTemplate(tokenizer, router.threads), self._tally, self._streams,
            spelling.text_of, given_prompts, router.session_sources, cold=self._cold, rows=self._turns.rows,
            long_work=router.long_work, threads=router.threads,
        )  # fmt: skip
        router.components.register("trajectories", self.retrieval)
        made = SessionTurns(self._trajectories, spelling.text_of, self._turns.rows, self._cold, self._streams)
        router.components.register("session_turns", made)
        router.components.register("session_list", RecordedSessions(self._trajectories, self._cold))
        self._aborts = Aborts(
            router=router,
            interruptions=self._interruptions,
            tokenizer=tokenizer,
            stop_conditions=StopConditions(tokenizer, eos_ids(tokenizer, settings.hf_checkpoint)),
            spelling=spelling,
            tally=self._tally,
            count=settings.abort_retries,
            wait_s=settings.abort_retry_wait_s,
            resume=settings.resume_aborted,
        )

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Subscribe to pauses and aborts; keep the trajectories in the store or the log, if there is one."""
        if (events := router.components.find("control_events")) is not None:
            self._interruptions.follow(events)
        router.tasks.start_soon(self._interruptions.end_with, router.stopping)
        if (store := router.components.find("cold_store")) is not None:
            reader = fingerprint(router.components.get("tokenizer"))
            async with self._cold.kept_in(store, reader, router.tasks):
                self._turns.rows.keep_in(router.components.find("token_rows"), self._cold)
                yield
            return
        self._turns.rows.keep_in(router.components.find("token_rows"), None)
        if self._log is None:
            yield
            return
        logged = self._log.trajectories
        logger.info("the trajectory log had %d segments with %d tokens", logged.segments, logged.tokens)
        router.tasks.start_soon(logged.tidy)
        try:
            yield
        finally:
            logged.close()

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        """Return the retrieval routes, and ``/cache_stats``."""
        return self.retrieval.routes(self.get_stats)

    def get_stats(self) -> dict[str, Any]:
        """Return the sizes of the cache, and its counters."""
        kept, losses = self._trajectories, self._trajectories.losses
        return {
            "entries": kept.segments,
            "tokens": kept.tokens,
            "bytes": kept.size_bytes,
            "evictions": dict(kept.evicted),
            "lost": {"sessions": losses.sessions.as_dict(), "texts": losses.texts.as_dict()},
            **self._tally.as_dict(),
            **self._turns.rows.as_dict(),
            **self._cold.as_dict(),
            "tokenizer": self._encoder.as_dict(),
            **({"log": self._log.directory.as_dict()} if self._log is not None else {}),
        }

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        """Send ``input_ids`` instead of ``text``."""
        request = exchange.request
        if self._pool.passthrough or request.path != "/generate" or not generates(request):
            return
        if self._encoder.refused is not None:
            self._tally.untouched(self._encoder.refused)
            return
        try:
            body = await self._router.read_json(exchange)
        except TooManyValues:  # a body that is passed on unread could ask for more than max_sequences
            raise
        except BadRequest:
            self._tally.untouched(MALFORMED)
            return
        check_size(body, self._settings.max_sequences)
        self._encoder.check_length(longest_ids(body))
        wanted = read_generation(body)
        if isinstance(wanted, str):
            self._tally.untouched(wanted)
            return
        check_rid(rid := body.get("rid"))
        await self._cold.room()
        try:
            turns = await self._begin(exchange, wanted)
            document = rewritten(body, wanted, [np.frombuffer(turn.ids, np.int32) for turn in turns])
            document = self._turns.rows.asked(exchange, body, document, turns)
        except Exception as error:
            if isinstance(error, HTTPError) and not isinstance(error, StoreFailed):
                raise  # an invalid request (such as a session name that is too long), or NotNoted
            self._tally.untouched("failed")
            self._tally.unrecorded("prompt_not_tokenised", error)
            return
        if document is not None:
            request.replace_json(document)
            if sum(turn.tokens for turn in turns) > _MANY_TOKENS:
                await self._router.write_json(exchange)
        # A client that sends tokens handles aborts itself. For example, slime and miles end each rollout by an abort.
        generation = None if handles_aborts(exchange, wanted) else self._aborts.begin(exchange, rid)
        exchange.notes[NOTE] = _Noted(wanted, turns, generation)
        exchange.on_close(partial(self._count, exchange))

    async def _begin(self, exchange: Exchange, wanted: GenerationRequest) -> list[PromptTurn]:
        turns: list[PromptTurn] = []
        exchange.on_close(partial(self._end, turns))
        prompts: Sequence[str | bytes] = wanted.prompts
        client = exchange.client
        breaks = self._router.long_work.breaks(client)
        for prompt, adapter in zip(prompts, wanted.adapters, strict=True):
            await breaks.take()
            turn = await self._turns.begin(
                prompt, exchange.session, adapter=adapter, doubt=wanted.doubt, client=client
            )
            turns.append(turn)
        for prompt, turn in zip(prompts, turns, strict=True):
            await breaks.take()
            await self._turns.encode(turn, prompt, is_tokenised=TOKENISED in exchange.notes)
        return turns

    def _end(self, turns: Sequence[PromptTurn]) -> None:
        for turn in turns:
            self._turns.end(turn)

    def _count(self, exchange: Exchange) -> None:
        if exchange.reply is not None and exchange.reply.status == 200:
            self._tally.generation((exchange.parent or exchange).request.path, self._verdicts.of(exchange))

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        """Record the answer, or arrange that a stream is recorded while it passes."""
        noted: _Noted | None = exchange.notes.get(NOTE)
        reply = exchange.reply
        if noted is None or reply is None or reply.status != 200 or is_only_proxied(exchange.worker):
            mark_untouched(exchange, self._trajectories, self._tally)
            return
        noted.turns = [sequence for turn in noted.turns for sequence in turn.sequences(noted.wanted.copies)]
        if noted.wanted.copies == 1:  # a later plugin may have set the rid
            for turn, rid in zip(noted.turns, rids_of(exchange.request.json(), noted.wanted), strict=True):
                turn.rid = rid
        worker = exchange.worker.url if exchange.worker is not None else "unknown"
        kind = media_type(reply)
        if kind == EVENTS:
            if self._log is not None:
                exchange.on_close(self._log.unfinished.begin(exchange.session))
            recorder = StreamRecorder(noted.turns, self._turns, self._tally, self._streams, worker)
            if (generation := noted.generation) is not None and len(noted.turns) == 1:
                reply.pass_through(lambda source: ResumingStream(generation, source, recorder))
            tap_events(exchange, reply, recorder)
        elif kind == JSON:
            answers = WholeAnswers(
                self._turns, exchange, noted.wanted, noted.turns, noted.generation, self._router.long_work
            )
            try:
                if await answers.pass_on(reply) and self._log is not None:
                    exchange.on_close(self._log.unfinished.begin(exchange.session))
            except HTTPError:
                raise
            except Exception as error:
                self._turns.fail(noted.turns, error, worker)
        else:
            wrong = ValueError(f"wanted JSON or events, got {kind.decode('latin-1')!r}")
            self._turns.fail(noted.turns, wrong, worker)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        """Evict (with a store: demote) segments not used within the last ``--gc-threshold-k`` weight versions."""
        self._trajectories.see_version(update.version)
