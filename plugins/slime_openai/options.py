"""What chat and completion requests have in common, and the lists of what has no effect and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_openai.errors import InvalidRequest, UnsupportedParameter
from slime_openai.fields import Reader, boolean, integer, mapping, only, refused, string, text
from slime_openai.sampling import SAMPLING, sampling_params

__all__ = ["COMMON", "NO_EFFECT", "REFUSED", "Options", "common_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``sampling``: ``sampling_params`` of ``/generate``, ready to send; ``engine``: more fields of its body."""

    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    return_routed_experts: bool = False
    rid: str | None = None
    session: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        n: int = self.sampling.get("n", 1)
        return n

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return tuple(self.sampling.get("stop", ()))


def _stream_options(param: str, value: Any) -> bool:
    """``include_usage``."""
    for key in mapping(param, value):
        if key not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise UnsupportedParameter(f"{param}.{key}", "only 'include_usage' can be honoured")
        if value[key] is not None and boolean(f"{param}.{key}", value[key]) and key != "include_usage":
            raise UnsupportedParameter(f"{param}.{key}", "only false can be honoured")
    return bool(value.get("include_usage"))


#: Sent to the engine beside the sampling parameters, as they are.
_ENGINE: Mapping[str, Reader] = {
    "cache_salt": string,
    "extra_key": string,
    "lora_path": string,
    "priority": integer(-(2**31), 2**31 - 1),
}

#: Accepted, checked, and without effect: they say nothing about what is generated.
NO_EFFECT: Mapping[str, Reader] = {
    "metadata": mapping,
    "modalities": only(["text"]),
    "prompt_cache_key": text,
    "prompt_cache_options": mapping,
    "prompt_cache_retention": text,
    "safety_identifier": text,
    "service_tier": only("auto", "default"),
    "store": only(False),
    "user": text,
    "verbosity": only("medium"),
}

_TEXT_ONLY = "answers are text"
_TO_GENERATE = "it is honoured on /generate only"

#: Known, and refused by name.
REFUSED: Mapping[str, Reader] = {
    "audio": refused(_TEXT_ONLY),
    "function_call": refused("it gave way to 'tool_choice'"),
    "functions": refused("they gave way to 'tools'"),
    "moderation": refused("nothing is moderated here"),
    "prediction": refused("outputs cannot be predicted here"),
    "web_search_options": refused("there is no web search here"),
    **dict.fromkeys(
        (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "custom_logit_processor",
            "custom_params",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "input_ids",
            "return_hidden_states",
            "routed_dp_rank",
            "session_params",
            "stop_regex",
        ),
        refused(_TO_GENERATE),
    ),
}

#: Every parameter that both routes honour.
COMMON: Mapping[str, Reader] = {
    **SAMPLING,
    **_ENGINE,
    "model": text,
    "return_routed_experts": boolean,
    "return_token_ids": boolean,
    "rid": string,
    "session_id": string,
    "stream": boolean,
    "stream_options": _stream_options,
}


def common_options(values: Mapping[str, Any], *, max_tokens: int | None) -> dict[str, Any]:
    """The fields of :class:`Options`. Raises InvalidRequest for parameters that contradict each other."""
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options", "'stream_options' is only allowed together with 'stream'.")
    return {
        "model": values.get("model"),
        "stream": values.get("stream", False),
        "include_usage": values.get("stream_options", False),
        "return_token_ids": values.get("return_token_ids", False),
        "return_routed_experts": values.get("return_routed_experts", False),
        "rid": values.get("rid"),
        "session": values.get("session_id"),
        "sampling": sampling_params(values, max_tokens=max_tokens),
        "engine": {name: values[name] for name in _ENGINE if name in values},
    }
