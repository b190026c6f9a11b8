"""Continuous batching: sequences join and leave a running batch, and each gets one token per step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

import anyio

from slime_engine.backend import Backend
from slime_engine.dispatch import Dispatcher
from slime_engine.errors import BadRequest
from slime_engine.grammars import Bound
from slime_engine.journal import Journal
from slime_engine.language import FloatArray
from slime_engine.requests import GenerateRequest
from slime_engine.sequence import FinishReason, Sequence, TokenDelta
from slime_engine.settings import Settings
from slime_engine.signals import Signal
from slime_engine.steps import Steps
from slime_engine.transfer import Handover

__all__ = ["PauseMode", "Scheduler"]

PauseMode = Literal["abort", "retract", "in_place"]

#: The number of logits that are handled before the event loop gets a turn: some hundred microseconds of work.
_SAMPLED_AT_ONCE = 20_000


class Scheduler:
    """Samples tokens, writes the journal, and emits TokenDeltas.

    The state changes only between awaits, on one event loop, so it needs no lock. Aborts and pauses act at once, also
    in the middle of a step: that step gives no token to a sequence that was aborted or is paused.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        journal: Journal,
        emit: Callable[[list[TokenDelta]], None],
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._backend = backend
        self._at_once = max(1, _SAMPLED_AT_ONCE // backend.vocab_size)
        self._journal = journal
        self._emit = emit
        self._clock = clock
        self._latency_s = settings.latency_ms / 1000
        self._period_s = 1 / settings.tokens_per_second if settings.tokens_per_second else 0.0
        self.max_running = settings.max_running_requests
        self.version = settings.weight_version
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        #: On a prefill engine, by room: sequences whose token no decode engine has fetched yet.
        self.handing: dict[int, Sequence] = {}
        self._mode = settings.disaggregation_mode
        self._ranks = Dispatcher(settings)
        self._steps = Steps(backend, scores_prompts=self._mode != "decode")
        self._computing = 0  # number of ranks that compute logits now
        self._loading = False
        self.paused = False
        #: Kinds of memory that are released, such as ``weights``.
        self.released: set[str] = set()
        self.updates_waiting = 0
        self._changed = Signal()
        self.tokens: Counter[str] = Counter()

    def submit(
        self,
        request: GenerateRequest,
        input_ids: list[int],
        *,
        max_new_tokens: int,
        seed: int,
        bound: Bound | None = None,
        script: list[int] | None = None,
    ) -> None:
        """Queue ``request``. Precondition: no unfinished sequence has its rid or, on a prefill engine, its room."""
        rank = self._ranks.rank_of(request)
        entry = self._journal.open(request.rid, input_ids, request.params.temperature, rank)
        self.waiting[request.rid] = sequence = Sequence(
            request,
            input_ids,
            max_new_tokens=max_new_tokens,
            seed=seed,
            entry=entry,
            due_at=self._clock() + self._latency_s,
            bound=bound,
            script=script,
        )
        sequence.expected = self._mode == "decode"
        self._changed.notify()

    def receive(self, rid: str, handover: Handover) -> None:
        """Take a sequence's first token from the prefill engine. Ignore it if the sequence was aborted."""
        sequence = self.waiting.get(rid)
        if sequence is not None and sequence.expected:
            sequence.expected = False
            sequence.given = True
            sequence.taken_for = self.version
            sequence.cached_before = handover.cached_tokens
            self._steps.give(sequence, handover.token_id, handover.logprob, handover.top, handover.version)
            self._begin(sequence)  # it has a token, which an abort must report
            self._changed.notify()

    async def hand_over(self, room: int, dp_rank: int | None) -> Handover:
        """Wait for the first token of the sequence in ``room``, end the sequence, and return the handover.

        Raises BadRequest if the sequence is on another rank than ``dp_rank``.
        """
        await self._changed.wait_for(lambda: room in self.handing)
        sequence = self.handing[room]
        if dp_rank not in (None, sequence.entry.dp_rank):
            raise BadRequest(f"Room {room} is on rank {sequence.entry.dp_rank}, not {dp_rank}.")
        del self.handing[room]
        handover = Handover.of(sequence)
        self.fail([sequence], {"type": "length", "length": 1})
        return handover

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that run, wait, or wait to be handed over."""
        return [*self.running.values(), *self.waiting.values(), *self.handing.values()]

    def abort(self, rid: str) -> None:
        """End one sequence; its tokens so far are its result. An unknown rid is ignored."""
        sequence = self.running.pop(rid, None) or self.waiting.pop(rid, None)
        for room in [room for room, handed in self.handing.items() if handed.rid == rid]:
            sequence = self.handing.pop(room)
        if sequence is not None:
            message = "Aborted" if sequence.started else "Abort in waiting queue"
            self.fail([sequence], {"type": "abort", "message": message})

    def abort_prefix(self, prefix: str) -> None:
        """End every sequence whose rid begins with ``prefix``; an empty prefix means all."""
        for rid in [each.rid for each in self.unfinished() if each.rid.startswith(prefix)]:
            self.abort(rid)

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing until ``resume``. ``abort``: end all sequences. ``in_place``: leave them as they are.

        ``retract``: put running sequences back in the queue, with their tokens.
        """
        self.paused = True
        if mode == "abort":
            self.abort_prefix("")
        elif mode == "retract":
            for sequence in self.running.values():
                sequence.retractions += 1
            self.waiting = {**self.running, **self.waiting}
            self.running = {}
        self._changed.notify()

    def resume(self) -> None:
        self.paused = False
        self._changed.notify()

    def release_memory(self, tags: Iterable[str]) -> None:
        """Sample nothing until the memory of all ``tags`` is resumed."""
        self.released.update(tags)
        self._changed.notify()

    def resume_memory(self, tags: Iterable[str]) -> None:
        self.released.difference_update(tags)
        self._changed.notify()

    async def update_weights(self, version: str | None, load: Callable[[], Awaitable[None]]) -> None:
        """Run ``load`` when the engine is paused or no sequence runs. Then set the version, unless it is None.

        No sequence is admitted meanwhile. A running step or update ends first. If ``load`` raises, the version stays.
        """
        self.updates_waiting += 1
        try:
            await self._changed.wait_for(self._may_load)
            self._loading = True
            try:
                await load()
                self.version = self.version if version is None else version
            finally:
                self._loading = False
        finally:
            self.updates_waiting -= 1
            self._changed.notify()

    def _may_load(self) -> bool:
        return (self.paused or not self.running) and not (self._computing or self._loading)

    def fail(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        """Finish ``sequences``, which the caller has taken out of the queues, with ``reason``."""
        ended = list(sequences)
        for sequence in ended:
            self._steps.release(sequence)
        self._emit([sequence.delta(reason, self.version) for sequence in ended])
        self._changed.notify()

    def fail_all(self, reason: FinishReason) -> None:
        """Finish all sequences with ``reason``."""
        unfinished = self.unfinished()
        self.running, self.waiting, self.handing = {}, {}, {}
        self.fail(unfinished, reason)

    async def run(self, rank: int = 0) -> None:
        """Step for ever with the sequences of one rank. An exception here is a crash of the engine."""
        while True:
            self._admit(rank)
            now = self._clock()
            due = [] if self._stands_still() else [s for s in self._running_on(rank) if s.due_at <= now]
            for group in _grouped(due, self._backend.batch_size):
                await self._step(group)
            if not due:
                await self._until_due(rank)

    def _running_on(self, rank: int) -> list[Sequence]:
        return [sequence for sequence in self.running.values() if sequence.rank == rank]

    def _stands_still(self) -> bool:
        return self.paused or bool(self.released) or self._loading

    def _is_active(self, sequence: Sequence) -> bool:
        return self.running.get(sequence.rid) is sequence and not self._stands_still()

    def _admit(self, rank: int) -> None:
        if self._stands_still() or self.updates_waiting:
            return
        free = self.max_running - len(self._running_on(rank))
        here = (rid for rid, each in self.waiting.items() if each.rank == rank and not each.expected)
        for rid in list(islice(here, max(0, free))):
            sequence = self.running[rid] = self.waiting.pop(rid)
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        if not sequence.started:
            sequence.started = True
            self._steps.begin(sequence)
            self.tokens["prompt"] += len(sequence.input_ids)

    async def _until_due(self, rank: int) -> None:
        """Wait for a due token or a change of state. No await may stand between a look at the state and this call."""
        wait_s = None
        if (running := self._running_on(rank)) and not self._stands_still():
            wait_s = max(0.0, min(sequence.due_at for sequence in running) - self._clock())
        with anyio.move_on_after(wait_s):
            await self._changed.wait()

    async def _step(self, group: list[Sequence]) -> None:
        """Advance each sequence by a token, or score a part of its prompt, unless it is aborted or paused meanwhile."""
        version = self.version  # of the weights that the logits come from
        active = [sequence for sequence in group if self._is_active(sequence)]
        asked = [(one.rid, query) for one in active if (query := self._steps.query(one)) is not None]
        self._computing += 1
        try:
            answers = await self._backend.logits([query for _, query in asked], version) if asked else []
        finally:
            self._computing -= 1
            if self.updates_waiting:
                self._changed.notify()
        rows = dict(zip((rid for rid, _ in asked), answers, strict=True))
        for part in _grouped(active, self._at_once):
            deltas: list[TokenDelta] = []
            try:
                for sequence in part:
                    deltas += self._advance(sequence, rows.get(sequence.rid), version)
            finally:  # tokens that were sampled before a crash are sent, too
                if deltas:
                    self._emit(deltas)
            await asyncio.sleep(0)

    def _advance(self, sequence: Sequence, rows: FloatArray | None, version: str) -> Iterator[TokenDelta]:
        """Advance one sequence. ``rows``: the logits of its query, or None if it had no query."""
        if not self._is_active(sequence):
            return
        if rows is not None and self._steps.score_prompt(sequence, rows):
            return
        if sequence.given:
            sequence.given = False
        elif rows is not None and sequence.max_new_tokens > 0:
            self._steps.sample(sequence, rows[0], version)
            self.tokens["generation"] += 1
            # A late token does not make the next ones come in a burst.
            sequence.due_at = max(sequence.due_at, self._clock() - self._period_s) + self._period_s
        reason = self._steps.finish_reason(sequence)
        if reason is not None:
            del self.running[sequence.rid]
            self._changed.notify()
            if self._mode == "prefill" and sequence.request.room is not None and sequence.completion_tokens:
                self.handing[sequence.request.room.number] = sequence
                return
            self._steps.release(sequence)
        interval = sequence.params.stream_interval
        if reason is not None or (sequence.request.stream and sequence.completion_tokens % interval == 0):
            yield sequence.delta(reason, self.version)


def _grouped(sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
    return (sequences[start : start + size] for start in range(0, len(sequences), size))
