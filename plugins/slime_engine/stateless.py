"""Backend of models whose logits are a function of the tokens and of the version, such as the n-gram model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime_engine.backend import ExpertsArray, Query, Run
from slime_engine.language import FloatArray, LanguageModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings

__all__ = ["StatelessBackend"]


class StatelessBackend:
    """Asks ``model`` for each sequence, on the event loop. The version is all that an update of weights changes.

    Routed experts are simulated, as ``settings`` say.
    """

    #: Queries answered before the event loop gets a turn; some hundred microseconds of work.
    batch_size = 16
    context_length = None

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.obeys = model.obeys
        self.has_routed_experts = settings.moe_layers > 0
        self.info: dict[str, Any] = {
            "model_path": settings.model_name,
            "model_type": "slime_ngram",
            "architectures": ["NgramModel"],
        }
        if self.has_routed_experts:
            self.info |= {"num_hidden_layers": settings.moe_layers, "num_experts_per_tok": settings.moe_topk}

    def begin(self) -> Run:
        return Run()

    async def logits(self, queries: Sequence[Query], version: str) -> list[FloatArray]:
        return [self._rows(query, version) for query in queries]

    def _rows(self, query: Query, version: str) -> FloatArray:
        if query.end == len(query.context):
            return self._model.next_logits(query.context, version)[None]
        places = range(query.end - query.count + 1, query.end + 1)
        return np.stack([self._model.next_logits(query.context, version, place) for place in places])

    def release(self, run: Run) -> None:
        """Do nothing: a sequence has no state."""

    def routed_experts(self, run: Run, ids: Sequence[int], start: int) -> ExpertsArray | None:
        return routed_experts(ids, start, self._settings) if self.has_routed_experts else None

    async def update_weights(self, source: str, body: Mapping[str, Any]) -> None:
        """Accept any weights: the scheduler's version selects the distribution."""

    async def flush_cache(self) -> None:
        """Do nothing: there is no cache."""
