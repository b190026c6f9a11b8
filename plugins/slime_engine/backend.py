"""Protocol between the scheduler and the model behind it: batched logits, weights, and the state of each sequence.

One contract suite tests all implementations: ``tests/engine/backends``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slime_engine.language import FloatArray, Vocabulary

__all__ = ["Backend", "ExpertsArray", "Query", "Run", "WeightsRefused"]

#: int32 of shape ``[tokens, layers, top_k]``.
ExpertsArray = npt.NDArray[np.int32]


class WeightsRefused(Exception):
    """An update of the weights failed, and the engine keeps the old weights. The message says why."""


class Run:
    """A backend's state of one sequence. ``rank``: the data-parallel rank of the sequence.

    ``cached_tokens``: prompt tokens whose keys and values came from a cache.
    """

    cached_tokens = 0
    rank = 0


@dataclass(frozen=True, slots=True)
class Query:
    """A request for ``count`` rows of logits: after ``context[: end - count + 1]``, and so on, up to ``context[:end]``.

    The keys and values of ``context[: end - count]`` may come from other sequences.
    """

    run: Run
    context: Sequence[int]
    end: int
    count: int = 1


class Backend(Vocabulary, Protocol):
    """A model that the scheduler drives. One engine owns it; all methods are called on the engine's event loop.

    The exception is ``routed_experts``, which a thread may call.
    """

    @property
    def context_length(self) -> int | None:
        """The largest number of tokens in one sequence, or None without a limit."""
        ...

    @property
    def batch_size(self) -> int:
        """The largest number of queries in one call of ``logits``."""
        ...

    @property
    def has_routed_experts(self) -> bool: ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Fields of ``/model_info`` that describe the model, such as ``model_path`` and the shape of routed experts."""
        ...

    def begin(self, rank: int = 0) -> Run:
        """Return the state of a new sequence on ``rank``. The sequence reuses only what that rank has computed."""
        ...

    async def logits(self, queries: Sequence[Query], version: str) -> list[FloatArray]:
        """Return finite logits for each query, shape ``[count, vocab_size]``; the caller owns the arrays.

        A sequence has at most one query in a call, and may be released during the call. The sequences of a call are on
        one rank. Calls for several ranks may overlap. ``version`` is the label of the weights. An exception crashes the
        engine.
        """
        ...

    def release(self, run: Run) -> None:
        """End a sequence. Its state may serve later sequences that begin with the same tokens."""
        ...

    def routed_experts(self, run: Run, ids: Sequence[int], start: int) -> ExpertsArray | None:
        """Return the experts of ``ids[start:-1]``; None if the model has no experts, or has not computed these tokens.

        If the token after ``ids[i]`` was sampled, the row of ``ids[i]`` is from the pass whose logits gave that token.
        A later pass that computes ``ids[i]`` again does not change the row.
        """
        ...

    async def update_weights(self, source: str, body: Mapping[str, Any]) -> None:
        """Change the weights as ``/update_weights_from_<source>`` asks with ``body``, and drop all cached state.

        No logits are computed meanwhile. Raises WeightsRefused, or EngineError for a request that cannot be served.
        """
        ...

    async def flush_cache(self) -> None:
        """Drop the state of ended sequences, and all state that running sequences can compute again."""
        ...
