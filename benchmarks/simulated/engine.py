"""A simulated engine: continuous batching, and an LRU cache of keys and values."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from benchmarks.simulated.prompts import BLOCK, Text
from slime_policies.kv_events.batches import Event, Removed, Stored

__all__ = ["Costs", "Engine", "Generation"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and sizes of an engine; roughly those of a model of 8B parameters on a large GPU.

    ``prefill_per_s``: tokens of prompts a second. ``chunk``: the most tokens of prompts in one step. ``step_s``: the
    time of a step that samples one token for each running request; ``per_running_s``: the time that each running
    request adds to the step. ``running``: the most requests that run at once. ``cache``: tokens of the KV cache.
    ``shortest_first``: prompts with the fewest tokens to prefill go first; False: first come, first served.
    """

    prefill_per_s: float = 16_000.0
    chunk: int = 2048
    step_s: float = 0.008
    per_running_s: float = 0.000_1
    running: int = 64
    cache: int = 160_000
    shortest_first: bool = False


@dataclass(slots=True)
class Generation:
    """A request to an engine, and its outcome. Times are in seconds since the start of the simulation.

    ``answer``: the text that the cache stores at the end. ``cached``: tokens of the prompt that the cache had.
    ``left``: tokens of the prompt that are still to be prefilled; None until the engine has looked the prompt up in its
    cache. ``begun`` is called after the first token, ``done`` after the last one.
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
    left: int | None = None


class Engine:
    """Runs steps while it has requests. ``at(time, call)`` asks the simulation to call ``call`` at ``time``.

    ``ranks``: the number of ranks. Each rank has a cache and a queue of its own. All ranks step together: a step takes
    as long as the slowest rank needs.
    """

    def __init__(
        self, costs: Costs, at: Callable[[float, Callable[[float], None]], None], ranks: int = 1
    ) -> None:
        self._at = at
        self._ranks = [_Rank(costs) for _ in range(ranks)]
        self._is_busy = False
        self._step_ends_s = 0.0

    def first_token_s(self, prompt: Text, now: float, rank: int = 0) -> float:
        """Return the seconds until the first token of ``prompt``, if it is sent now."""
        return max(0.0, self._step_ends_s - now) + self._ranks[rank].first_token_s(prompt)

    def tell(self, changed: Callable[[Event], None], rank: int = 0) -> None:
        """Call ``changed`` for each later change of the cache of ``rank``, with the KV event that reports it."""
        self._ranks[rank].changed = changed

    def send(self, generation: Generation, now: float, rank: int = 0) -> None:
        """Queue ``generation``."""
        self._ranks[rank].waiting.append(generation)
        if not self._is_busy:
            self._is_busy = True
            self._at(now, self._step)

    def _step(self, now: float) -> None:
        steps = [rank.step() for rank in self._ranks]
        then = self._step_ends_s = now + max(took for took, _, _ in steps)
        begun = [generation for _, started, _ in steps for generation in started]
        over = [generation for _, _, ended in steps for generation in ended]
        for generation in begun:
            generation.first_s = then
        self._at(then, lambda now: self._end_step(now, begun, over))

    def _end_step(self, now: float, begun: list[Generation], over: list[Generation]) -> None:
        for generation in begun:
            generation.begun()
        for generation in over:
            generation.done_s = now
            generation.done(generation)
        if any(rank.waiting or rank.running for rank in self._ranks):
            self._step(now)
        else:
            self._is_busy = False


class _Rank:
    """The queue, the batch and the cache of one rank. ``running``: a heap, by the step that samples the last token."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.waiting: deque[Generation] = deque()
        self.running: list[tuple[int, int, Generation]] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self.changed: Callable[[Event], None] | None = None
        self._steps = 0
        self._started = 0

    def step(self) -> tuple[float, list[Generation], list[Generation]]:
        """Prefill a chunk of the waiting prompts, and sample a token for each running request.

        Returns the time of the step, the requests that get their first token, and those that get their last one.
        """
        costs = self._costs
        begun, prefilled = self._prefill()
        sampled = len(self.running) + len(begun)
        took = prefilled / costs.prefill_per_s
        if sampled:
            took += costs.step_s + costs.per_running_s * sampled
        self._steps += 1
        for generation in begun:
            self._started += 1
            last = self._steps + generation.new_tokens - 1
            heapq.heappush(self.running, (last, self._started, generation))
        over = []
        while self.running and self.running[0][0] <= self._steps:
            over.append(heapq.heappop(self.running)[2])
            self._store(over[-1].answer)
        return took, begun, over

    def first_token_s(self, prompt: Text) -> float:
        """Return the seconds from the beginning of the next step to the end of the step with the first token."""
        costs = self._costs
        missing = self._missing(prompt)
        ahead = [self._left(waiting) for waiting in self.waiting]
        tokens = missing + sum(left for left in ahead if not costs.shortest_first or left <= missing)
        steps = ceil(tokens / costs.chunk)
        return tokens / costs.prefill_per_s + steps * (costs.step_s + costs.per_running_s * len(self.running))

    def _missing(self, prompt: Text) -> int:
        return prompt.tokens - min(self._match(prompt), prompt.tokens - 1)

    def _left(self, generation: Generation) -> int:
        return self._missing(generation.prompt) if generation.left is None else generation.left

    def _prefill(self) -> tuple[list[Generation], int]:
        """Prefill a chunk. Returns the requests whose prompts are now prefilled, and the tokens of the chunk."""
        begun: list[Generation] = []
        budget = self._costs.chunk
        if self._costs.shortest_first:
            self.waiting = deque(sorted(self.waiting, key=self._left))
        while budget and self.waiting and len(self.running) + len(begun) < self._costs.running:
            generation = self.waiting[0]
            prompt = generation.prompt
            if generation.left is None:
                generation.left = self._missing(prompt)
                generation.cached = prompt.tokens - generation.left
            taken = min(budget, generation.left)
            generation.left -= taken
            budget -= taken
            if not generation.left:
                self.waiting.popleft()
                self._store(prompt)
                begun.append(generation)
        return begun, self._costs.chunk - budget

    def _match(self, prompt: Text) -> int:
        return self._first_missing(prompt) * BLOCK

    def _first_missing(self, text: Text) -> int:
        return next(
            (place for place, key in enumerate(text.blocks) if key not in self._cache), len(text.blocks)
        )

    def _store(self, text: Text) -> None:
        if self.changed is not None and (new := self._first_missing(text)) < len(text.blocks):
            ids = text.ids()[new * BLOCK : len(text.blocks) * BLOCK]
            self.changed(Stored([*text.blocks[new:]], text.blocks[new - 1] if new else None, ids, BLOCK))
        for block in reversed(text.blocks):  # so that the end of a text is evicted before its beginning
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) * BLOCK > self._costs.cache:
            evicted, _ = self._cache.popitem(last=False)
            if self.changed is not None:
                self.changed(Removed([evicted]))
