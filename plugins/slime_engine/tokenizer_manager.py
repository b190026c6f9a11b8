"""Tokenises requests, hands them to the scheduler, and yields their outputs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyio import CancelScope, to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from slime_engine.backend import Backend
from slime_engine.errors import BadRequest, Crashed, EngineError
from slime_engine.grammars import Bound, Grammars
from slime_engine.moe import encode_experts
from slime_engine.replies import JSONDict, Reply
from slime_engine.requests import GenerateBody, GenerateRequest
from slime_engine.scheduler import Scheduler
from slime_engine.scripted import ScriptedAnswers
from slime_engine.sequence import TextDelta
from slime_engine.settings import Settings
from slime_engine.transfer import TransferFailed, fetch

__all__ = ["ReqState", "TokenizerManager"]

#: Texts of at least this many characters in all are tokenised in a thread.
_LONG_TEXT = 10_000


@dataclass(slots=True)
class ReqState:
    """One sequence, as the waiting HTTP request sees it; all sequences of one HTTP request share the event."""

    request: GenerateRequest
    reply: Reply
    event: asyncio.Event
    out_list: list[TextDelta] = field(default_factory=list)
    finished: bool = False
    error: EngineError | None = None

    def take(self) -> list[TextDelta]:
        """Return all deltas since the last call."""
        taken, self.out_list = self.out_list, []
        return taken


class TokenizerManager:
    """The engine's first and last stage. ``start_soon`` runs a coroutine in the engine's task group."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        scheduler: Scheduler,
        source: asyncio.Queue[list[TextDelta]],
        start_soon: Callable[[Callable[[], Any]], None],
    ) -> None:
        self._backend = backend
        self._tokenizer = backend.tokenizer
        self._grammars = Grammars(backend.tokenizer)
        script = settings.script
        self._scripted = None if script is None else ScriptedAnswers(script, backend.tokenizer)
        self._settings = settings
        self._scheduler = scheduler
        self._source = source
        self._start_soon = start_soon
        self._looping = False
        self._seeds = random.Random(settings.seed)
        self.rid_to_state: dict[str, ReqState] = {}
        self._receiving: dict[str, CancelScope] = {}

    async def generate(self, body: GenerateBody) -> AsyncIterator[JSONDict]:
        """Yield outputs as they come. Without streaming, each sequence has one output, when it has ended.

        If ``body.is_list``, each output has the ``index`` of its sequence. Closing the iterator aborts unfinished
        sequences. Raises EngineError.
        """
        self._auto_create_handle_loop()
        event = asyncio.Event()
        states = self._register(body.requests, event)
        try:
            for request in body.requests:
                self._check_place(request)
            prompts = await self._prompts(body.requests)
            bounds = [await self._bound(request) for request in body.requests]
            scripts = [self._script(*each) for each in zip(prompts, bounds, strict=True)]
            for request, (ids, max_new_tokens), bound, script in zip(
                body.requests, prompts, bounds, scripts, strict=True
            ):
                self._check_room(request)
                seed = self._seed(request)
                self._scheduler.submit(
                    request, ids, max_new_tokens=max_new_tokens, seed=seed, bound=bound, script=script
                )
                if self._settings.disaggregation_mode == "decode":
                    self._receiving[request.rid] = CancelScope()
                    self._start_soon(partial(self._receive, request, ids, self._receiving[request.rid]))
            pending = dict(enumerate(zip(body.requests, states, strict=True)))
            while pending:
                await event.wait()
                # A cancellation is delivered only while an await blocks. The wait above never blocks if the
                # engine samples a token in each turn of the event loop.
                await checkpoint_if_cancelled()
                event.clear()
                for index, (request, state) in list(pending.items()):
                    if state.error is not None:
                        raise state.error
                    finished, deltas = state.finished, state.take()
                    if not deltas:
                        continue
                    output = state.reply.add(deltas)
                    if finished:
                        del pending[index]
                        await self._add_experts(request, deltas[-1], output)
                    if body.is_list:
                        output["index"] = index
                    yield output
        finally:
            for request, state in zip(body.requests, states, strict=True):
                receiving = self._receiving.pop(request.rid, None)
                if receiving is not None:
                    receiving.cancel()
                if not state.finished:
                    del self.rid_to_state[request.rid]
                    self._scheduler.abort(request.rid)

    async def collect(self, body: GenerateBody) -> JSONDict | list[JSONDict]:
        """Return the whole answer to a request that does not stream."""
        outputs = [output async for output in self.generate(body)]
        if not body.is_list:
            return outputs[0]
        outputs.sort(key=lambda output: int(output["index"]))
        for output in outputs:
            del output["index"]
        return outputs

    async def _receive(self, request: GenerateRequest, input_ids: list[int], scope: CancelScope) -> None:
        """Fetch the first token of ``request`` from the prefill engine, and give it to the scheduler."""
        assert request.room is not None  # narrowing: a request without a room was refused
        with scope:
            try:
                handover = await fetch(request.room)
                if handover.input_ids != input_ids:
                    raise TransferFailed("The prefill engine handed over the token of another prompt.")
            except TransferFailed as error:
                state = self.rid_to_state.get(request.rid)
                if state is not None and state.request is request:
                    state.error = Crashed(str(error))
                    state.event.set()
            else:
                self._scheduler.receive(request.rid, handover)

    def fail_all(self, error: EngineError) -> None:
        """Raise ``error`` in every waiting HTTP request."""
        for state in self.rid_to_state.values():
            state.error = error
            state.event.set()

    def _register(self, requests: list[GenerateRequest], event: asyncio.Event) -> list[ReqState]:
        rids = [request.rid for request in requests]
        taken = self.rid_to_state.keys() & rids
        if taken or len(set(rids)) < len(rids):
            duplicate = next(rid for rid in rids if rid in taken or rids.count(rid) > 1)
            raise BadRequest(f"Duplicate request ID detected: {duplicate}")
        states = []
        for request in requests:
            incremental = request.stream and self._settings.incremental_streaming_output
            reply = Reply(request, self._tokenizer, incremental=incremental)
            states.append(ReqState(request, reply, event))
        self.rid_to_state.update(zip(rids, states, strict=True))
        return states

    def _check_place(self, request: GenerateRequest) -> None:
        """Check that a decode engine gets a room, and that the rank exists. Raises BadRequest."""
        settings = self._settings
        if settings.disaggregation_mode == "decode" and request.room is None:
            raise BadRequest("A decode engine needs bootstrap_room.")
        if request.dp_rank is not None and request.dp_rank >= settings.dp_size:
            raise BadRequest(f"routed_dp_rank {request.dp_rank} is out of range [0, {settings.dp_size}).")

    def _check_room(self, request: GenerateRequest) -> None:
        """Check on a prefill engine that no unfinished sequence has the request's room. Raises BadRequest.

        A decode engine names only the room, so it might get the token of the other sequence.
        """
        if self._settings.disaggregation_mode != "prefill" or request.room is None:
            return
        number = request.room.number
        rooms = (one.request.room for one in self._scheduler.unfinished())
        if any(room is not None and room.number == number for room in rooms):
            raise BadRequest(f"bootstrap_room {number} is the room of another unfinished request.")

    async def _prompts(self, requests: list[GenerateRequest]) -> list[tuple[list[int], int]]:
        """Return the ids of each prompt, and the largest number of tokens to sample. Raises BadRequest."""
        encoded = iter(await self.encode([one.text or "" for one in requests if one.input_ids is None]))
        prompts = [next(encoded) if one.input_ids is None else one.input_ids for one in requests]
        return [(ids, self._most_tokens(one, len(ids))) for one, ids in zip(requests, prompts, strict=True)]

    def _most_tokens(self, request: GenerateRequest, prompt_tokens: int) -> int:
        most = self._max_new_tokens(request, prompt_tokens)
        hands_over = self._settings.disaggregation_mode == "prefill" and request.room is not None
        return 1 if hands_over else most  # a prefill engine hands over one token

    async def _bound(self, request: GenerateRequest) -> Bound | None:
        """Return the grammar state of the answer, if it has a grammar. Raises BadRequest."""
        grammar = request.params.grammar
        return None if grammar is None else await to_thread.run_sync(self._grammars.bind, grammar)

    def _script(self, prompt: tuple[list[int], int], bound: Bound | None) -> list[int]:
        """Return the scripted answer's tokens for a prompt, if there are any. Raises BadRequest."""
        ids, _ = prompt
        return [] if self._scripted is None else self._scripted.ids(ids, bound)

    def _seed(self, request: GenerateRequest) -> int:
        seed = request.params.sampling_seed
        return self._seeds.getrandbits(63) if seed is None else seed

    async def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text. Long texts are tokenised in a thread, so that other requests go on."""

        def encoded() -> list[list[int]]:
            return [self._tokenizer.encode(text) for text in texts]

        return encoded() if sum(map(len, texts)) < _LONG_TEXT else await to_thread.run_sync(encoded)

    def _max_new_tokens(self, request: GenerateRequest, prompt_tokens: int) -> int:
        """Return the number of tokens that may be generated. Raises BadRequest, for example for too long a prompt."""
        limit, params = self._settings.context_length, request.params
        if prompt_tokens == 0:
            raise BadRequest("The prompt is empty.")
        if prompt_tokens >= limit:
            raise BadRequest(
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
            )
        total = prompt_tokens + params.max_new_tokens
        if total > limit and not params.may_shorten:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You "
                f"requested a total of {total} tokens: {prompt_tokens} tokens from the input and "
                f"{params.max_new_tokens} tokens for the completion."
            )
        for name in ("logprob_start_len", "routed_experts_start_len"):
            if getattr(request, name) > prompt_tokens:
                raise BadRequest(f"{name} is higher than the number of input tokens ({prompt_tokens}).")
        return min(params.max_new_tokens, limit - prompt_tokens - 1 if params.may_shorten else limit)

    async def _add_experts(self, request: GenerateRequest, last: TextDelta, output: JSONDict) -> None:
        sequence = last.tokens.sequence
        run, start = sequence.run, request.routed_experts_start_len
        if run is None or not (request.return_routed_experts and self._backend.has_routed_experts):
            return

        def encoded() -> str | None:
            experts = self._backend.routed_experts(run, sequence.context, start)
            if experts is None:
                return None
            if self._settings.disaggregation_mode == "decode":  # the prompt went through another engine
                experts[: len(sequence.input_ids) - start] = 0
            return encode_experts(experts)

        encoding = await to_thread.run_sync(encoded)
        if encoding is not None:
            output["meta_info"]["routed_experts"] = encoding
            output["meta_info"]["routed_experts_start_len"] = start

    def _auto_create_handle_loop(self) -> None:
        if not self._looping:
            self._looping = True
            self._start_soon(self.handle_loop)

    async def handle_loop(self) -> None:
        """Take the detokenizer's deltas for ever. Wake each HTTP request that has new ones."""
        while True:
            events = set()
            for delta in await self._source.get():
                request = delta.tokens.sequence.request
                state = self.rid_to_state.get(request.rid)
                if state is None or state.request is not request:
                    continue  # the client has gone; another request may have the rid now
                state.out_list.append(delta)
                if delta.tokens.finish_reason is not None:
                    state.finished = True
                    del self.rid_to_state[request.rid]
                events.add(state.event)
            for event in events:
                event.set()
