"""Tiny models with random weights, as checkpoints that both the engine and the trainer load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from slime_engine.tokenizer import corpus_documents, train_tokenizer

__all__ = ["LAYERS", "TOP_K", "save_model"]

LAYERS, TOP_K = 3, 2
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    "norm_topk_prob": True,
}


def save_model(directory: Path, *, moe: bool, seed: int) -> Path:
    """Write a Qwen3-MoE if ``moe``, else a Llama, and the engine's tokenizer, into ``directory``, and return it."""
    tokenizer = train_tokenizer(corpus_documents())
    ends = sorted(tokenizer.eos_ids)
    common = {**_SIZES, "vocab_size": tokenizer.vocab_size, "eos_token_id": ends, "pad_token_id": ends[0]}
    plain: Any = transformers  # its classes have no annotations
    config = plain.Qwen3MoeConfig(**common, **_EXPERTS) if moe else plain.LlamaConfig(**common)
    torch.manual_seed(seed)
    plain.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory
