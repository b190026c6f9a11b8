"""Weights of a checkpoint directory, and updates of them."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from slime_engine.backend import WeightsRefused
from slime_engine.errors import BadRequest, NotServed
from slime_engine.hf.attention import register
from slime_engine.hf.loading import load_whole
from slime_engine.hf.network import Network
from slime_engine.hf.tokenizer import HFTokenizer

__all__ = ["Checkpoint"]

_TENSORS_WANTED = (
    "serialized_named_tensors must be a list of base64 texts, each a safetensors file, "
    'and load_format must be "safetensors"; pickles are not read.'
)


class Checkpoint:
    """A directory as ``save_pretrained`` writes it. Models are computed in float32, on CUDA if there is a device.

    ``threads``: threads of a pass on the CPU, for the whole process. 0: half of the cores. A thread for each core would
    be many times slower while other processes work, since all threads wait for the last one.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        self.path = path
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // 2))
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        register()
        quiet: Any = logging.disable_progress_bar  # it has no annotations
        quiet()

    def network(self) -> Network:
        """Load the model. Raises ValueError or OSError."""
        return self._loaded(AutoModelForCausalLM, self.path)

    def tokenizer(self, network: Network) -> HFTokenizer:
        """Load the tokenizer of the model."""
        eos = network.model.generation_config.eos_token_id
        if eos is None and (self.path / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(str(self.path), local_files_only=True).eos_token_id
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return HFTokenizer(self.path, network.vocab_size, ids)

    def _loaded(self, kind: Any, path: Path, **more: Any) -> Network:
        return Network(load_whole(kind, path, **more).to(self._device))

    def updated(self, network: Network, source: str, body: Mapping[str, Any]) -> Network:
        """Return a network with new weights. If this raises, ``network`` keeps the old weights.

        For tensors, the result is ``network`` itself, with new weights. Raises WeightsRefused, BadRequest or NotServed.
        """
        if source == "disk":
            return self._from_disk(network, Path(body["model_path"]))
        if source == "tensor":
            return self._from_tensors(network, body)
        raise NotServed(
            f"The transformers backend does not serve /update_weights_from_{source}. "
            "Use /update_weights_from_disk or /update_weights_from_tensor."
        )

    def _from_disk(self, network: Network, path: Path) -> Network:
        if not path.is_dir():
            raise WeightsRefused(f"model_path must be a directory with a checkpoint, got {str(path)!r}.")
        model = network.model
        try:
            return self._loaded(type(model), path, config=copy.deepcopy(model.config))
        except Exception as error:  # the library raises many kinds
            raise WeightsRefused(f"The weights in {path} were not loaded: {error}") from error

    def _from_tensors(self, network: Network, body: Mapping[str, Any]) -> Network:
        """Copy the given tensors into the model, all of them or none. Other weights stay as they are."""
        given = body.get("serialized_named_tensors")
        if body.get("load_format") != "safetensors" or not isinstance(given, list) or not given:
            raise BadRequest(_TENSORS_WANTED)
        tensors: dict[str, torch.Tensor] = {}
        for text in given:
            try:
                tensors |= safetensors.torch.load(base64.b64decode(text, validate=True))
            except (TypeError, binascii.Error, safetensors.SafetensorError) as error:
                raise BadRequest(f"{_TENSORS_WANTED} {error}") from None
        own = network.model.state_dict()
        for name, tensor in tensors.items():
            if name not in own:
                raise WeightsRefused(
                    f"The model has no weight {name!r}. It has: {', '.join(sorted(own)[:5])}, ..."
                )
            if tensor.shape != own[name].shape:
                wanted, found = list(own[name].shape), list(tensor.shape)
                raise WeightsRefused(f"{name} must have the shape {wanted}, got {found}.")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        return network
