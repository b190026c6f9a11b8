"""Fields that a ``/generate`` request may have without making the tokens of its answer inexact.

The fields are those of SGLang 0.5.23 (``GenerateReqInput`` in srt/managers/io_struct.py, ``SamplingParams`` in
srt/sampling/sampling_params.py). Left out on purpose are fields that change the context or the output without a trace
in the ids: embedding overrides, custom logit processors and their parameters, and a forced end of thinking. A field
whose name begins with ``return_`` only asks for more in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_sampling_parameter", "unknown_field"]

_TOP_LEVEL = frozenset(
    (
        "background",
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "cache_salt",
        "conversation_id",
        "custom_labels",
        "data_parallel_rank",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "external_trace_header",
        "extra_key",
        "http_worker_ipc",
        "input_ids",
        "kv_router_hint",
        "log_metrics",
        "logprob_start_len",
        "lora_path",
        "no_logs",
        "priority",
        "received_time",
        "require_reasoning",
        "return_logprob",
        "rid",
        "routed_dp_rank",
        "routed_experts_start_len",
        "routing_key",
        "sampling_params",
        "session_id",
        "stream",
        "text",
        "token_ids_logprob",
        "top_logprobs_num",
    )
)
_SAMPLING = frozenset(
    (
        "ebnf",
        "frequency_penalty",
        "ignore_eos",
        "json_schema",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "stream_interval",
        "structural_tag",
        "temperature",
        "top_k",
        "top_p",
    )
)
_ASKS_FOR_MORE = "return_"
#: An empty list in one of these fields means no media, as in SGLang (``_normalize_image_data`` in
#: srt/managers/io_struct.py).
_MEDIA = ("image_data", "video_data", "audio_data")


def unknown_field(body: Mapping[str, Any]) -> str | None:
    """Return the alphabetically first field of ``body`` that is not known to be harmless, or None.

    Sampling parameters are checked, too. Null stands for the default, as in SGLang, and so does an empty list of media.
    """
    unknown: list[str] = []
    if not body.keys() <= _TOP_LEVEL:  # a third of the time of a set difference
        unknown += [
            name
            for name in body.keys() - _TOP_LEVEL
            if body[name] is not None
            and not name.startswith(_ASKS_FOR_MORE)
            and not (name in _MEDIA and body[name] == [])
        ]
    parameters = body.get("sampling_params")
    for one in parameters if isinstance(parameters, list) else (parameters,):
        if isinstance(one, dict) and not one.keys() <= _SAMPLING:
            unknown += [name for name in one.keys() - _SAMPLING if one[name] is not None]
    return min(unknown) if unknown else None


def is_sampling_parameter(name: str) -> bool:
    """Return True for the name of a field of ``sampling_params``."""
    return name in _SAMPLING
