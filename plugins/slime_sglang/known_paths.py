"""Paths that engines answer, or that plugins answer without a route."""

from __future__ import annotations

__all__ = ["KNOWN_PATHS"]

KNOWN_PATHS = frozenset(
    (
        "/abort_request", "/api/chat", "/api/generate", "/begin_weight_update", "/classify",
        "/continue_generation", "/destroy_weights_update_group", "/detokenize", "/encode", "/end_weight_update",
        "/engine_metrics", "/flush_cache", "/generate", "/get_loads", "/get_model_info", "/get_server_info",
        "/get_weight_version", "/health_generate", "/init_weights_update_group", "/invocations",
        "/load_lora_adapter", "/load_lora_adapter_from_distributed", "/load_lora_adapter_from_tensors",
        "/model_info", "/pause_generation", "/post_process_weights", "/pull_weights", "/release_memory_occupation",
        "/rerank", "/resume_memory_occupation", "/score", "/server_info", "/start_profile", "/stop_profile",
        "/tokenize", "/unload_lora_adapter", "/update_weight_version", "/update_weights_from_disk",
        "/update_weights_from_distributed", "/update_weights_from_ipc", "/update_weights_from_tensor",
        "/v1/chat/completions", "/v1/classify", "/v1/completions", "/v1/detokenize", "/v1/embeddings", "/v1/loads",
        "/v1/messages", "/v1/models", "/v1/rerank", "/v1/responses", "/v1/score", "/v1/tokenize",
        "/vertex_generate",
    )
)  # fmt: skip
