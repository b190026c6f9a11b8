"""Backend of models whose logits are a function of the tokens and of the version, such as the n-gram model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from slime_engine.backend import ExpertsArray, Query, Run
from slime_engine.kv_events import Event
from slime_engine.language import FloatArray, LanguageModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings
from slime_engine.simulated_cache import SimulatedCache

__all__ = ["StatelessBackend"]


class StatelessBackend:
    """Asks ``model`` for the logits of each sequence, on the event loop. An update of weights changes only the version,
    and empties the simulated caches.

    Routed experts are simulated, as ``settings`` say, and so is a KV cache of each data-parallel rank. With
    ``prefill_tokens_per_second``, the tokens of a new prompt that the cache lacks take time. Meanwhile no sequence of
    the same rank gets a token. A decode engine has no cache, and its prompts take no time: a prefill engine computed
    them.
    """

    #: The largest number of queries answered before the event loop gets a turn; some hundred microseconds of work.
    batch_size = 16
    context_length = None

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.obeys = model.obeys
        has_prompts = settings.disaggregation_mode != "decode"
        tokens = settings.kv_cache_tokens
        ranks = range(settings.dp_size if tokens and has_prompts else 0)
        #: By data-parallel rank; empty: no KV cache is simulated.
        self.caches = [SimulatedCache(tokens, settings.page_size) for _ in ranks]
        self._publish: Callable[[int, list[Event]], None] | None = None
        self._prefill_per_s = settings.prefill_tokens_per_second if has_prompts else 0.0
        self.has_routed_experts = settings.moe_layers > 0
        self.info: dict[str, Any] = {
            "model_path": settings.model_name,
            "model_type": "slime_ngram",
            "architectures": ["NgramModel"],
        }
        if self.has_routed_experts:
            self.info |= {"num_hidden_layers": settings.moe_layers, "num_experts_per_tok": settings.moe_topk}

    def publish_to(self, publish: Callable[[int, list[Event]], None]) -> None:
        """Clear the simulated caches. Give this change and all later ones to ``publish``, in order for each rank."""
        self._publish = publish
        for cache in self.caches:
            cache.record()
        self._publish_changes()

    def _publish_changes(self) -> None:
        if self._publish is not None:
            for rank, cache in enumerate(self.caches):
                if events := cache.take_events():
                    self._publish(rank, events)

    def begin(self, rank: int = 0) -> _Run:
        run = _Run()
        run.rank = rank
        return run

    async def logits(self, queries: Sequence[Query], version: str) -> list[FloatArray]:
        computed = sum(map(self._compute, queries))
        self._publish_changes()
        if computed and self._prefill_per_s:
            await anyio.sleep(computed / self._prefill_per_s)
        return [self._rows(query, version) for query in queries]

    def _compute(self, query: Query) -> int:
        """Note that the tokens of ``query`` are computed. Return the number of new prompt tokens among them.

        A prompt token is new if neither the cache nor an earlier query of the sequence had it.

        A prompt that is scored may take several queries. The cache is searched at the first of them, and gets the
        prompt at the last.
        """
        run = query.run
        assert isinstance(run, _Run)  # narrowing: begin has made it
        if self.caches and not run.end:
            run.cached_tokens = self.caches[run.rank].match(query.context, query.end - query.count)
        had_prompt, known = run.has_prompt, run.end or run.cached_tokens
        run.context, run.end = query.context, query.end
        if had_prompt:
            return 0
        run.has_prompt = query.end == len(query.context)
        if self.caches and run.has_prompt:
            self.caches[run.rank].store(query.context, query.end)
        return query.end - known

    def _rows(self, query: Query, version: str) -> FloatArray:
        if query.end == len(query.context):
            return self._model.next_logits(query.context, version)[None]
        places = range(query.end - query.count + 1, query.end + 1)
        return np.stack([self._model.next_logits(query.context, version, place) for place in places])

    def release(self, run: Run) -> None:
        """Add the computed tokens of the sequence to the simulated cache."""
        if self.caches and isinstance(run, _Run):
            self.caches[run.rank].store(run.context, run.end)
            self._publish_changes()

    def routed_experts(self, run: Run, ids: Sequence[int], start: int) -> ExpertsArray | None:
        return routed_experts(ids, start, self._settings) if self.has_routed_experts else None

    async def update_weights(self, source: str, body: Mapping[str, Any]) -> None:
        """Accept any weights: the scheduler's version selects the distribution."""
        await self.flush_cache()

    async def flush_cache(self) -> None:
        """Clear the simulated caches. Running sequences go on, and the caches get their tokens when they end."""
        for cache in self.caches:
            cache.clear()
        self._publish_changes()


class _Run(Run):
    """A sequence. Its tokens ``context[:end]`` have been computed. ``has_prompt``: they include the whole prompt."""

    context: Sequence[int] = ()
    end = 0
    has_prompt = False
