"""Continuous batching: sequences join and leave a running batch, each gets one token per step."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

import anyio
import numpy as np

from slime_engine.journal import Journal
from slime_engine.model import FloatArray, NgramModel, log_softmax
from slime_engine.requests import GenerateRequest
from slime_engine.sampling import choose, uniform
from slime_engine.sequence import FinishReason, ScoredToken, Sequence, TokenDelta
from slime_engine.settings import Settings
from slime_engine.signals import Signal

__all__ = ["PauseMode", "Scheduler"]

PauseMode = Literal["abort", "retract", "in_place"]

#: Sequences advanced before the event loop gets a turn; some hundred microseconds of work.
_GROUP = 16
#: Prompt tokens scored per turn for ``logprob_start_len``.
_PREFILL_CHUNK = 64


class Scheduler:
    """Samples, writes the journal, and says what happened in TokenDeltas.

    All state changes happen between awaits of one event loop, so nothing is locked. The methods that
    clients call (abort, pause, update) act at once, also in the middle of a step.
    """

    def __init__(
        self,
        model: NgramModel,
        settings: Settings,
        journal: Journal,
        emit: Callable[[list[TokenDelta]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._journal = journal
        self._emit = emit
        self._clock = clock
        self._latency_s = settings.latency_ms / 1000
        self._period_s = 1 / settings.tokens_per_second if settings.tokens_per_second else 0.0
        self.max_running = settings.max_running_requests
        self.version = settings.weight_version
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.paused = False
        self.memory_released = False
        self._updates_waiting = 0
        self._changed = Signal()
        self.tokens: Counter[str] = Counter()

    # What clients ask for ---------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, input_ids: list[int], *, max_new_tokens: int, seed: int
    ) -> None:
        """Queue a request. No sequence with its rid may be under way."""
        entry = self._journal.open(request.rid, input_ids, request.params.temperature)
        first_token_at = self._clock() + self._latency_s
        self.waiting[request.rid] = Sequence(
            request, input_ids, max_new_tokens=max_new_tokens, seed=seed, entry=entry, due_at=first_token_at
        )
        self._changed.notify()

    def abort(self, rid: str) -> None:
        """End one sequence; what it has so far is its result. An unknown rid is nothing to do."""
        sequence = self.running.pop(rid, None) or self.waiting.pop(rid, None)
        if sequence is not None:
            message = "Aborted" if sequence.started else "Abort in waiting queue"
            self.fail([sequence], {"type": "abort", "message": message})

    def abort_prefix(self, prefix: str) -> None:
        """End every sequence whose rid begins with ``prefix``; an empty one means all."""
        for rid in [rid for rid in (*self.running, *self.waiting) if rid.startswith(prefix)]:
            self.abort(rid)

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing until ``resume``. ``abort`` ends all, ``retract`` puts the running ones back in the
        queue (their tokens are kept), ``in_place`` leaves them where they are."""
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

    def release_memory(self, released: bool) -> None:
        """Nothing is sampled while the memory of weights and cache is given away."""
        self.memory_released = released
        self._changed.notify()

    async def update_weights(self, version: str) -> None:
        """Sample from other weights. Waits, letting nobody in, until no sequence runs; at once while paused."""
        self._updates_waiting += 1
        try:
            await self._changed.wait_for(lambda: self.paused or not self.running)
            self.version = version
        finally:
            self._updates_waiting -= 1
            self._changed.notify()

    def fail(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        """Finish sequences, already taken out of the queues, for a reason outside of them."""
        self._emit([self._delta(sequence, reason) for sequence in sequences])
        self._changed.notify()

    def fail_all(self, reason: FinishReason) -> None:
        """Finish everything that runs or waits."""
        everybody = [*self.running.values(), *self.waiting.values()]
        self.running, self.waiting = {}, {}
        self.fail(everybody, reason)

    # What the loop does -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Step for ever. An exception here is a crash of the engine."""
        while True:
            self._admit()
            now = self._clock()
            due = [] if self._stands_still() else [s for s in self.running.values() if s.due_at <= now]
            for group in _grouped(due, _GROUP):
                if deltas := [delta for sequence in group for delta in self._advance(sequence)]:
                    self._emit(deltas)
                await asyncio.sleep(0)
            if not due:
                await self._until_due()

    def _stands_still(self) -> bool:
        return self.paused or self.memory_released

    def _admit(self) -> None:
        if self._stands_still() or self._updates_waiting:
            return
        free = self.max_running - len(self.running)
        for rid in list(islice(self.waiting, max(0, free))):
            sequence = self.running[rid] = self.waiting.pop(rid)
            if not sequence.started:
                sequence.started = True
                self.tokens["prompt"] += len(sequence.input_ids)

    async def _until_due(self) -> None:
        """Sleep until the next token is due, or something changed. Nothing is awaited before that."""
        wait_s = None
        if self.running and not self._stands_still():
            wait_s = max(0.0, min(s.due_at for s in self.running.values()) - self._clock())
        with anyio.move_on_after(wait_s):
            await self._changed.wait()

    def _advance(self, sequence: Sequence) -> Iterator[TokenDelta]:
        """One token for one sequence, unless it was aborted or paused since the step began."""
        if sequence.rid not in self.running or self._stands_still():
            return
        if self._score_prompt(sequence):
            return
        if sequence.max_new_tokens > 0:
            self._sample(sequence)
        reason = self._finish_reason(sequence)
        if reason is not None:
            del self.running[sequence.rid]
            self._changed.notify()
        if reason is not None or sequence.request.stream:
            yield self._delta(sequence, reason)

    def _sample(self, sequence: Sequence) -> None:
        params, context = sequence.params, sequence.context
        forbidden: frozenset[int] = frozenset()
        if sequence.completion_tokens < params.min_new_tokens:
            forbidden = self._model.tokenizer.eos_ids | params.stop_token_ids
        logits = self._model.next_logits(context[-2:], self.version)
        luck = uniform(sequence.seed, len(context))
        token_id, logprobs = choose(logits, params, sequence.counts, forbidden, luck)
        logprob = float(logprobs[token_id])
        sequence.entry.append(token_id, logprob, self.version)
        context.append(token_id)
        sequence.unsent_logprobs.append(logprob)
        if sequence.request.top_logprobs_num:
            sequence.unsent_tops.append(_top(logprobs, sequence.request.top_logprobs_num))
        if params.penalises:
            sequence.counts[token_id] += 1
        self.tokens["generation"] += 1
        # A late token does not make the next ones come in a burst.
        sequence.due_at = max(sequence.due_at, self._clock() - self._period_s) + self._period_s

    def _score_prompt(self, sequence: Sequence) -> bool:
        """Log-probabilities of the prompt from ``logprob_start_len`` on; True while there are more to do."""
        request, ids = sequence.request, sequence.input_ids
        start = request.logprob_start_len
        if not request.return_logprob or start < 0:
            return False
        position = start + len(sequence.input_logprobs)
        for here in range(position, min(position + _PREFILL_CHUNK, len(ids))):
            logprobs = log_softmax(self._model.next_logits(ids[max(0, here - 2) : here], self.version))
            first = here == start  # as SGLang, which has no logits before the first token it scores
            sequence.input_logprobs.append((None if first else float(logprobs[ids[here]]), ids[here]))
            sequence.input_tops.append(None if first else _top(logprobs, request.top_logprobs_num))
        return position + _PREFILL_CHUNK < len(ids)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """In SGLang's order: a full length comes before a stop at the same token."""
        if sequence.completion_tokens >= sequence.max_new_tokens:
            return {"type": "length", "length": sequence.max_new_tokens}
        params, last = sequence.params, sequence.context[-1]
        stop_ids = self._model.tokenizer.eos_ids | params.stop_token_ids
        if last in stop_ids and not params.ignore_eos:
            return {"type": "stop", "matched": last}
        if sequence.stops:
            text = sequence.tail + self._model.tokenizer.token_bytes[last]
            for stop, encoded in sequence.stops:
                if encoded in text:
                    return {"type": "stop", "matched": stop}
            sequence.tail = text[-max(len(encoded) for _, encoded in sequence.stops) :]
        return None

    def _delta(self, sequence: Sequence, reason: FinishReason | None) -> TokenDelta:
        if reason is not None:
            sequence.entry.finish_reason = reason
        done = sequence.completion_tokens
        spans = sequence.entry.spans()
        delta = TokenDelta(
            sequence=sequence,
            token_ids=sequence.context[len(sequence.input_ids) + sequence.sent :],
            logprobs=sequence.unsent_logprobs,
            tops=sequence.unsent_tops,
            completion_tokens=done,
            spans=spans,
            weight_version=spans[-1][0] if spans else self.version,
            finish_reason=reason,
        )
        sequence.sent, sequence.unsent_logprobs, sequence.unsent_tops = done, [], []
        return delta


def _top(logprobs: FloatArray, count: int) -> list[ScoredToken]:
    """The ``count`` likeliest tokens, best first."""
    if not count:
        return []
    best = np.argsort(-logprobs, kind="stable")[:count]
    return [(float(logprobs[one]), int(one)) for one in best]


def _grouped(sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
    return (sequences[start : start + size] for start in range(0, len(sequences), size))
