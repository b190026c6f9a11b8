"""A simulated engine: continuous batching, and an LRU cache of keys and values."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulated.prompts import BLOCK, Text

__all__ = ["Costs", "Engine", "Generation"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and sizes of an engine; roughly those of a model of 8B parameters on a large GPU.

    ``prefill_per_s``: tokens of prompts. ``chunk``: of these, so many at most in one step. ``step_s``: a step that
    samples one token for each running request; ``per_running_s``: longer for each of them. ``running``: requests that
    run at once. ``cache``: tokens of the KV cache.
    """

    prefill_per_s: float = 16_000.0
    chunk: int = 2048
    step_s: float = 0.008
    per_running_s: float = 0.000_1
    running: int = 64
    cache: int = 160_000


@dataclass(slots=True)
class Generation:
    """A request to an engine, and its fate. Times are in seconds.

    ``answer``: the prompt with the ``new_tokens`` behind it. ``cached``: tokens of the prompt that the cache had.
    ``left``: tokens of the prompt that have to be prefilled yet. ``begun`` is called when the first token is there.
    """

    prompt: Text
    new_tokens: int
    answer: Text
    sent_s: float
    done: Callable[[Generation], None]
    begun: Callable[[], object]
    first_s: float = 0.0
    done_s: float = 0.0
    cached: int = 0
    left: int = 0


class Engine:
    """Runs steps while it has requests. ``at(time, call)`` asks the simulation for a call at a time."""

    def __init__(self, costs: Costs, at: Callable[[float, Callable[[float], None]], None]) -> None:
        self._costs = costs
        self._at = at
        self._waiting: deque[Generation] = deque()
        self._running: list[
            tuple[int, int, Generation]
        ] = []  # a heap, by the step that samples the last token
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._steps = 0
        self._started = 0
        self._is_busy = False

    def send(self, generation: Generation, now: float) -> None:
        """Queue ``generation``."""
        self._waiting.append(generation)
        if not self._is_busy:
            self._is_busy = True
            self._at(now, self._step)

    def _step(self, now: float) -> None:
        """Prefill a chunk of the waiting prompts, and sample a token for each running request."""
        costs = self._costs
        begun, prefilled = self._prefill()
        running = len(self._running) + len(begun)
        took = prefilled / costs.prefill_per_s
        if running:
            took += costs.step_s + costs.per_running_s * running
        self._steps += 1
        for generation in begun:
            generation.first_s = now + took
            self._started += 1
            last = self._steps + generation.new_tokens - 1
            heapq.heappush(self._running, (last, self._started, generation))
        over = []
        while self._running and self._running[0][0] <= self._steps:
            over.append(heapq.heappop(self._running)[2])
        self._at(now + took, lambda then: self._end_step(then, begun, over))

    def _prefill(self) -> tuple[list[Generation], int]:
        """Return the requests whose prompts are now prefilled, and the tokens that the step prefills."""
        begun: list[Generation] = []
        budget = self._costs.chunk
        while budget and self._waiting and len(self._running) + len(begun) < self._costs.running:
            generation = self._waiting[0]
            prompt = generation.prompt
            if not generation.left:
                generation.cached = min(self._match(prompt), prompt.tokens - 1)
                generation.left = prompt.tokens - generation.cached
            taken = min(budget, generation.left)
            generation.left -= taken
            budget -= taken
            if not generation.left:
                self._waiting.popleft()
                self._store(prompt)
                begun.append(generation)
        return begun, self._costs.chunk - budget

    def _end_step(self, now: float, begun: list[Generation], over: list[Generation]) -> None:
        for generation in begun:
            generation.begun()
        for generation in over:
            generation.done_s = now
            self._store(generation.answer)
            generation.done(generation)
        if self._waiting or self._running:
            self._step(now)
        else:
            self._is_busy = False

    def _match(self, prompt: Text) -> int:
        matched = 0
        for block in prompt.blocks:
            if block not in self._cache:
                break
            matched += BLOCK
        return matched

    def _store(self, text: Text) -> None:
        for block in reversed(text.blocks):  # so that long prefixes are evicted before short ones
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) * BLOCK > self._costs.cache:
            self._cache.popitem(last=False)
