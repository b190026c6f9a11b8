"""Keys and values of sequences, and a cache of ended sequences from which later sequences can copy them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from slime_engine.backend import Run

__all__ = ["KVRows", "KVRun", "PrefixCache", "common_prefix"]

#: The memory of a sequence grows in steps of this many tokens.
_GROWTH = 256

#: int32 of shape ``[layers, top_k]``: the experts of one token.
TokenExperts = npt.NDArray[np.int32]


class KVRows:
    """Keys and values of the first ``length`` tokens of a sequence, in each layer ``[heads, tokens, head_dim]``."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def extended(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of the next tokens in one layer, and return all rows of that layer.

        ``length`` does not change: the caller raises it when all layers have the rows.
        """
        end = self.length + keys.shape[1]
        spaces = []
        for old, new in zip(self._layers.get(layer, (None, None)), (keys, values), strict=True):
            space = old
            if space is None or space.shape[1] < end:
                space = new.new_empty(new.shape[0], -(-end // _GROWTH) * _GROWTH, new.shape[2])
                if old is not None:
                    space[:, : self.length] = old[:, : self.length]
            space[:, self.length : end] = new
            spaces.append(space)
        self._layers[layer] = (spaces[0], spaces[1])
        return spaces[0][:, :end], spaces[1][:, :end]

    def copy(self, length: int) -> KVRows:
        """Return a copy of the keys and values of the first ``length`` tokens."""
        rows = KVRows()
        for layer, (keys, values) in self._layers.items():
            rows.extended(layer, keys[:, :length], values[:, :length])
        rows.length = length
        return rows


class KVRun(Run):
    """A sequence: ``ids`` are the tokens that have keys and values, ``experts`` the experts of each of them.

    ``kept``: experts of the first tokens, from before the last :meth:`forget`. They are used instead of the experts of
    passes that compute these tokens again.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.started = False
        self.context: Sequence[int] = ()
        self._prompt_tokens = 0
        self.ids: list[int] = []
        self.rows = KVRows()
        self.experts: list[TokenExperts] = []
        self.kept: list[TokenExperts] = []

    def start(self, context: Sequence[int], cached_tokens: int) -> None:
        """Note the length of ``context``, before any token is sampled here, and how many of its tokens were cached."""
        self.started = True
        self.cached_tokens = cached_tokens
        self._prompt_tokens = len(context)

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        del self.ids[length:], self.experts[length:]
        self.rows.length = min(self.rows.length, length)

    def take(self, other: KVRun, length: int) -> None:
        """Begin with what is known of the first ``length`` tokens of ``other``: ids, keys, values and experts."""
        self.ids = other.ids[:length]
        self.rows = other.rows.copy(length)
        self.experts = other.experts[:length]

    def append(self, ids: Sequence[int], experts: Sequence[TokenExperts]) -> None:
        """Add the tokens ``ids``. All layers must have the rows of these tokens already."""
        self.experts.extend(experts)
        self.rows.length += len(ids)
        self.ids.extend(ids)

    def forget(self) -> None:
        """Drop all that was computed. If a token was sampled, keep the experts of all tokens before the last."""
        sampled_from = len(self.context) - 1 if len(self.context) > self._prompt_tokens else 0
        self.kept = self.routed(sampled_from)
        self.rows = KVRows()
        self.truncate(0)

    def routed(self, count: int) -> list[TokenExperts]:
        """Return the experts of the first ``count`` tokens, or of fewer if fewer are known."""
        return [*self.kept, *self.experts[len(self.kept) :]][:count]


class PrefixCache:
    """Sequences that have ended, at most ``limit`` tokens in all; the least recently used are dropped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: dict[KVRun, None] = {}
        self._tokens = 0

    def add(self, run: KVRun) -> None:
        """Keep the keys and values of ``run``, which must not change any more."""
        if not run.ids:  # aborted before its first pass
            return
        self._runs[run] = None
        self._tokens += len(run.ids)
        while self._tokens > self._limit:
            oldest = next(iter(self._runs))
            del self._runs[oldest]
            self._tokens -= len(oldest.ids)

    def clear(self) -> None:
        self._runs.clear()
        self._tokens = 0

    def longest(self, ids: Sequence[int], limit: int, running: Iterable[KVRun]) -> tuple[KVRun | None, int]:
        """Return the sequence that shares the longest prefix with ``ids[:limit]``, and the length of this prefix.

        The sequence has ended, or is one of ``running``. Returns ``(None, 0)`` if no sequence begins with the same id.
        """
        wanted = np.asarray(ids[:limit])
        best: tuple[KVRun | None, int] = (None, 0)
        for run in (*self._runs, *running):
            shared = common_prefix(wanted, run.ids)
            if shared > best[1]:
                best = (run, shared)
        if best[0] in self._runs:
            self._runs[best[0]] = self._runs.pop(best[0])
        return best


def common_prefix(one: Sequence[int] | npt.NDArray[np.int64], two: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(one), len(two))
    differ = np.flatnonzero(np.asarray(one[:size]) != np.asarray(two[:size]))
    return int(differ[0]) if len(differ) else size
