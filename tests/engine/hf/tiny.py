"""Tiny models with random weights, as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from slime_engine.tokenizer import EngineTokenizer

__all__ = ["CONFIGS", "outputs_of", "save_tiny"]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # the weights of an untrained model say little; these make some tokens likelier than others
    "initializer_range": 0.2,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}

#: By name, the class of a config and its arguments.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # a window shorter than the prompts
    "mistral": ("MistralConfig", {"tie_word_embeddings": True, "sliding_window": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
}


def save_tiny(name: str, tokenizer: EngineTokenizer, directory: Path, seed: int, **more: Any) -> Path:
    """Write a model of the kind ``name`` with the weights of ``seed``, and return its directory."""
    kind, arguments = CONFIGS[name]
    ends = sorted(tokenizer.eos_ids)
    config = getattr(transformers, kind)(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **_SIZES,
        **arguments,
        **more,
    )
    torch.manual_seed(seed)
    plain: Any = transformers.AutoModelForCausalLM  # its methods have no annotations
    plain.from_config(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def outputs_of(checkpoint: Path, ids: list[int], **more: Any) -> Any:
    """Return what a trainer computes: one pass of the library's own over the whole sequence."""
    kind: Any = transformers.AutoModelForCausalLM  # its methods have no annotations
    model = kind.from_pretrained(str(checkpoint), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False, **more)
