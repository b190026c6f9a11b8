"""A model of transformers whose router layers use recorded experts instead of their own choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["ExpertReplay"]

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpertReplay:
    """Replays experts in ``model``.

    Only the indices of the experts are recorded. The routing weights of these experts are the model's own, with
    gradients. The router layers are those of transformers that return ``(logits, scores, indices)``, as Qwen3-MoE's do.
    """

    def __init__(self, model: Any) -> None:
        self._experts: torch.Tensor | None = None
        for name, module in model.named_modules():
            found = _LAYER.search(name)
            if found is not None and type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._hook(int(found[1])))

    @contextmanager
    def of(self, experts: torch.Tensor | None) -> Iterator[None]:
        """Use ``experts``, int64 ``[batch, tokens, layers, top_k]``, in the block; None: the model's own choice."""
        self._experts = experts
        try:
            yield
        finally:
            self._experts = None

    def _hook(self, layer: int) -> Any:
        def replace(module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
            if self._experts is None:
                return None
            logits, scores, indices = output
            recorded = self._experts[..., layer, :].reshape(indices.shape)
            weights = logits.float().softmax(-1).gather(-1, recorded)
            if getattr(module, "norm_topk_prob", True):  # Mixtral has no such setting
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(scores.dtype), recorded

        return replace
