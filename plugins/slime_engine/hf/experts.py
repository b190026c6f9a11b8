"""Recorder of the experts that a mixture-of-experts model selects, by hooks on its router layers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from slime_engine.backend import ExpertsArray

__all__ = ["ExpertsRecorder"]

#: transformers' router layers return ``(logits, scores, indices)``, indices of shape ``[tokens, top_k]``.
_ROUTER = re.compile(r"TopKRouter$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpertsRecorder:
    """Notes the experts of each pass of ``model``. Layers without a router have zeros, as in SGLang's buffer.

    ``layers`` and ``top_k`` are 0 for a model without experts. Raises ValueError if the model has experts, but no
    router layer that can be read.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.layers = self.top_k = 0
        self._seen: dict[int, torch.Tensor] = {}
        routers = [
            (name, each) for name, each in model.named_modules() if _ROUTER.search(type(each).__name__)
        ]
        if not routers:
            count = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
            if count:
                raise ValueError(
                    f"{type(model).__name__} has experts, but no layer of a class ...TopKRouter; "
                    "the engine reads routed experts from such layers"
                )
            return
        self.layers = int(config.num_hidden_layers)
        self.top_k = int(config.num_experts_per_tok)
        for name, router in routers:
            found = _LAYER.search(name)
            if found is None:
                raise ValueError(f"router layer {name} has no number")
            router.register_forward_hook(self._hook(int(found[1])))

    def _hook(self, layer: int) -> Any:
        def note(module: Any, inputs: Any, output: Any) -> None:
            self._seen[layer] = output[-1]

        return note

    def clear(self) -> None:
        """Forget the experts of the last pass."""
        self._seen.clear()

    def take(self, tokens: int) -> ExpertsArray:
        """Return the experts of the last pass, which had ``tokens`` tokens, and forget them."""
        experts = np.zeros((tokens, self.layers, self.top_k), np.int32)
        for layer, indices in self._seen.items():
            experts[:, layer] = indices.reshape(tokens, self.top_k).cpu().numpy()
        self.clear()
        return experts
