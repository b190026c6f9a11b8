"""The transformers backend: continuous batching, with its own store of keys and values, in one thread at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread

from slime_engine.backend import ExpertsArray, Query, Run
from slime_engine.hf.kv import KVRun, PrefixCache, common_prefix
from slime_engine.hf.network import Network, Part
from slime_engine.hf.weights import Checkpoint
from slime_engine.language import FloatArray

__all__ = ["TransformersBackend"]

#: The largest number of tokens in one pass. A longer prompt takes several passes.
_PASS = 512


class TransformersBackend:
    """A model of ``checkpoint``. One thread at a time computes, and only it changes keys and values of sequences.

    The event loop starts and releases sequences. The thread collects the released ones at its next step, update or
    flush. ``prefix_tokens``: each rank keeps the keys and values of at most this many tokens of ended sequences.
    """

    batch_size = 256
    #: The model honours no parameter by itself: the sampler enforces all grammars.
    obeys: frozenset[str] = frozenset()

    def __init__(self, checkpoint: Checkpoint, prefix_tokens: int) -> None:
        self._checkpoint = checkpoint
        self._network = checkpoint.network()
        config = self._network.model.config.get_text_config()
        self.vocab_size = self._network.vocab_size
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.tokenizer = checkpoint.tokenizer(self._network)
        self.has_routed_experts = self._network.recorder.layers > 0
        self.info: dict[str, Any] = {
            "model_path": str(checkpoint.path),
            "model_type": config.model_type,
            "architectures": [type(self._network.model).__name__],
        }
        if self.has_routed_experts:
            recorder = self._network.recorder
            self.info |= {"num_hidden_layers": recorder.layers, "num_experts_per_tok": recorder.top_k}
        self._running: dict[KVRun, None] = {}
        self._released: deque[KVRun] = deque()
        self._prefixes: defaultdict[int, PrefixCache] = defaultdict(lambda: PrefixCache(prefix_tokens))
        self._limiter: CapacityLimiter | None = None

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        if self._limiter is None:  # a limiter must be made on the event loop that uses it
            self._limiter = CapacityLimiter(1)
        return await to_thread.run_sync(work, *arguments, limiter=self._limiter)

    def begin(self, rank: int = 0) -> Run:
        run = KVRun(rank)
        self._running[run] = None
        return run

    def release(self, run: Run) -> None:
        assert isinstance(run, KVRun)  # narrowing: from begin
        if run in self._running:
            del self._running[run]
            self._released.append(run)

    async def logits(self, queries: Sequence[Query], version: str) -> list[FloatArray]:
        found: list[FloatArray] = await self._in_thread(self._compute, queries)
        return found

    def routed_experts(self, run: Run, ids: Sequence[int], start: int) -> ExpertsArray | None:
        assert isinstance(run, KVRun)  # narrowing: from begin
        rows = run.routed(len(ids) - 1)
        if not self.has_routed_experts or len(rows) < len(ids) - 1:
            return None
        layers, top_k = self._network.recorder.layers, self._network.recorder.top_k
        return np.array(rows[start:], np.int32).reshape(-1, layers, top_k)

    async def update_weights(self, source: str, body: Mapping[str, Any]) -> None:
        await self._in_thread(self._update, source, body)

    def _update(self, source: str, body: Mapping[str, Any]) -> None:
        self._network = self._checkpoint.updated(self._network, source, body)
        self._flush()

    async def flush_cache(self) -> None:
        await self._in_thread(self._flush)

    def _flush(self) -> None:
        self._collect()
        self._prefixes.clear()
        for run in list(self._running):
            run.forget()

    # The methods from here on run in the thread, as do ``_update`` and ``_flush``.

    def _collect(self) -> None:
        while self._released:
            run = self._released.popleft()
            self._prefixes[run.rank].add(run)

    def _compute(self, queries: Sequence[Query]) -> list[FloatArray]:
        self._collect()
        step = _Step(self._network)
        for place, query in enumerate(queries):
            run, first = query.run, query.end - query.count
            assert isinstance(run, KVRun)  # narrowing: from begin
            run.context = query.context
            if not run.ids:
                self._take_prefix(run, query, step)
            run.truncate(first)  # a step whose logits were dropped is computed again
            step.add(place, run, query)
        return step.result(len(queries))

    def _take_prefix(self, run: KVRun, query: Query, step: _Step) -> None:
        """Let a sequence begin with keys and values that other sequences have, or get in this step."""
        ids, limit = query.context[: query.end], query.end - query.count
        prefixes = self._prefixes[run.rank]
        running = [each for each in list(self._running) if each.rank == run.rank]
        source, shared = prefixes.longest(ids, limit, running)
        if step.shares_more(ids, limit, shared):
            step.flush()
            source, shared = prefixes.longest(ids, limit, running)
        if source is not None:
            run.take(source, shared)
        if not run.started:
            run.start(query.context, shared)


class _Step:
    """The passes that answer one call of ``logits``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._parts: list[tuple[int, Part]] = []
        self._size = 0
        self._found: dict[int, list[FloatArray]] = {}

    def add(self, place: int, run: KVRun, query: Query) -> None:
        """Compute the rest of query number ``place``, now or with the next queries."""
        done, first = len(run.ids), query.end - query.count
        while done < query.end:
            end = min(query.end, done + _PASS - self._size)
            wanted = max(0, end - max(done, first))
            self._parts.append((place, Part(run, query.context[done:end], wanted)))
            self._size += end - done
            done = end
            if self._size == _PASS:
                self.flush()

    def shares_more(self, ids: Sequence[int], limit: int, shared: int) -> bool:
        """Return True if a sequence that waits for its pass shares more than ``shared`` tokens with ``ids``."""
        return any(common_prefix(ids[:limit], [*part.run.ids, *part.ids]) > shared for _, part in self._parts)

    def flush(self) -> None:
        """Compute what was added."""
        if self._parts:
            answers = self._network.forward([part for _, part in self._parts])
            for (place, _), rows in zip(self._parts, answers, strict=True):
                self._found.setdefault(place, []).append(rows)
            self._parts, self._size = [], 0

    def result(self, count: int) -> list[FloatArray]:
        self.flush()
        return [np.concatenate(self._found[place]) for place in range(count)]
