"""The trainer: GRPO on samples, in bfloat16 as usual, while the engine computes in float32."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
import transformers

from examples.grpo_tiny.replay import ExpertReplay
from examples.grpo_tiny.samples import Sample

__all__ = ["Trainer"]

_CLIP = 0.2


class Trainer:
    """Trains the model in ``checkpoint``. ``replay``: use the samples' experts instead of the model's own choice."""

    def __init__(self, checkpoint: Path, *, replay: bool, learning_rate: float = 5e-3) -> None:
        loader: Any = transformers.AutoModelForCausalLM  # its methods have no annotations
        self._model = loader.from_pretrained(str(checkpoint), dtype=torch.float32)
        self._replay = ExpertReplay(self._model)
        self._replays = replay
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, samples: Sequence[Sample], advantages: Sequence[float]) -> list[npt.NDArray[np.float64]]:
        """Do one step. Return each sample's log-probabilities before the step, of all its tokens except the first."""
        rows = [torch.tensor(sample.tokens) for sample in samples]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = _padded([sample.mask for sample in samples])[:, 1:].bool()
        experts = self._experts(samples, tokens.shape[1] - 1) if self._replays else None
        with self._replay.of(experts), torch.autocast("cpu", torch.bfloat16):
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        found = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        if all(sample.logprobs is not None for sample in samples):
            old = _padded([sample.logprobs for sample in samples])[:, 1:].float()
        else:  # text that was tokenised again has no log-probabilities
            old = found.detach()
        weight = torch.tensor(advantages, dtype=torch.float32)[:, None]
        ratio = torch.where(mask, found - old, 0.0).exp()
        objective = torch.minimum(ratio * weight, ratio.clamp(1 - _CLIP, 1 + _CLIP) * weight)
        self._optimizer.zero_grad()
        (-(objective * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return [
            row[: len(sample.tokens) - 1].double().numpy()
            for row, sample in zip(found.detach(), samples, strict=True)
        ]

    def _experts(self, samples: Sequence[Sample], length: int) -> torch.Tensor:
        """Return the experts of all samples, ``[batch, length, layers, top_k]``. Padding gets the first experts."""
        known = [sample.experts for sample in samples if sample.experts is not None]
        if len(known) != len(samples):
            raise ValueError(f"{len(samples) - len(known)} samples have no routed experts")
        _, layers, top_k = known[0].shape
        experts = torch.arange(top_k).expand(len(samples), length, layers, top_k).clone()
        for row, own in zip(experts, known, strict=True):
            row[: len(own)] = torch.tensor(own)
        return experts

    def weights(self) -> str:
        """Return the weights as base64 of a safetensors file, for ``/update_weights_from_tensor``."""
        tied = self._model.config.tie_word_embeddings
        own = self._model.state_dict().items()
        tensors = {name: tensor for name, tensor in own if not (tied and name == "lm_head.weight")}
        return base64.b64encode(safetensors.torch.save(tensors)).decode()


def _padded(rows: Sequence[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
