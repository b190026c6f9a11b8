"""Options that chat and completion requests share, and the parameters that have no effect or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_openai.errors import InvalidRequest, UnsupportedParameter, wrong
from slime_openai.requests.fields import (
    Reader,
    boolean,
    integer,
    mapping,
    nested,
    only,
    or_each,
    refused,
    string,
    text,
)
from slime_openai.requests.sampling import SAMPLING, sampling_params

__all__ = ["COMMON", "NO_EFFECT", "REFUSED", "Options", "common_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a request. ``sampling``: the ``sampling_params`` for ``/generate``.

    ``engine``: other fields for the body of ``/generate``. ``unknown``: parameters that the router does not know, and
    ``add_special_tokens`` where it cannot be honoured. ``tokens_as_ids``: logprobs show ``token_id:ID`` for a token,
    not its text.
    ``return_meta_info``: the client wants the engine's ``meta_info``, and so knows SGLang.
    """

    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_routed_experts: bool = False
    tokens_as_ids: bool = False
    rid: str | None = None
    session: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)

    @property
    def wants_prompt_ids(self) -> bool:
        """True when the client wants the prompt's token ids."""
        return self.return_token_ids or self.return_prompt_token_ids

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        n: int = self.sampling.get("n", 1)
        return n

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return tuple(self.sampling.get("stop", ()))


def _stream_options(param: str, value: Any) -> bool:
    """Return ``include_usage``. Refuse all other options.

    Two exceptions are accepted if they are false or null: ``include_obfuscation`` and ``continuous_usage_stats``.
    """
    for key in mapping(param, value):
        if key not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise UnsupportedParameter(f"{param}.{key}", "only 'include_usage' can be honoured")
        if value[key] is not None and boolean(f"{param}.{key}", value[key]) and key != "include_usage":
            raise UnsupportedParameter(f"{param}.{key}", "only false can be honoured")
    return bool(value.get("include_usage"))


def _hidden_states(param: str, value: Any) -> bool | str:
    if value != "last" and not isinstance(value, bool):
        raise wrong(param, 'true, false or "last"', value)
    return value  # type: ignore[no-any-return]  # checked above


_INT64 = 2**63
_RANK = integer(0, 2**31 - 1)
#: SGLang's fields beside the sampling parameters. They go to the engine unchanged, except ``cache_salt``.
_ENGINE: Mapping[str, Reader] = {
    "bootstrap_host": or_each(string),
    "bootstrap_port": or_each(integer(0, 65_535)),
    "bootstrap_room": or_each(integer(0, _INT64 - 1)),
    "cache_salt": string,
    "custom_labels": nested,
    "custom_logit_processor": string,
    "data_parallel_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "extra_key": string,
    "lora_path": string,
    "ngram_corpus_id": string,
    "priority": integer(-(2**31), 2**31 - 1),
    "return_hidden_states": _hidden_states,
    "return_indexer_topk": boolean,
    "routed_dp_rank": _RANK,
    "routed_experts_start_len": integer(0, 2**31 - 1),
}

#: vLLM's names for SGLang's parameters.
_VLLM_NAMES = {"include_stop_str_in_output": "no_stop_trim", "request_id": "rid"}

#: Parameters that are accepted and checked, but do not change what is generated.
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
_ITS_OWN_PROMPT = "the router makes the prompt here; only /generate honours this parameter"

#: Known parameters that are refused.
REFUSED: Mapping[str, Reader] = {
    "audio": refused(_TEXT_ONLY),
    "function_call": refused("send 'tool_choice' instead"),
    "functions": refused("send 'tools' instead"),
    "moderation": refused("nothing is moderated here"),
    "prediction": refused("outputs cannot be predicted here"),
    "web_search_options": refused("there is no web search here"),
    "session_params": refused(_ITS_OWN_PROMPT),
    "stop_regex": refused("the router cannot know where such a stop begins; only /generate honours this"),
}

#: The parameters that both routes honour.
COMMON: Mapping[str, Reader] = {
    **SAMPLING,
    **_ENGINE,
    "include_stop_str_in_output": boolean,
    "model": text,
    "request_id": string,
    "return_meta_info": boolean,
    "return_prompt_token_ids": boolean,
    "return_routed_experts": boolean,
    "return_token_ids": boolean,
    "return_tokens_as_token_ids": boolean,
    "rid": string,
    "session_id": string,
    "stream": boolean,
    "stream_options": _stream_options,
}


def common_options(
    values: Mapping[str, Any], unknown: dict[str, Any], *, max_tokens: int | None
) -> dict[str, Any]:
    """Return the fields of :class:`Options`. Raises InvalidRequest for parameters that contradict each other."""
    values = _in_sglangs_names(values)
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options", "'stream_options' is only allowed together with 'stream'.")
    return {
        "model": values.get("model"),
        "stream": values.get("stream", False),
        "include_usage": values.get("stream_options", False),
        "return_token_ids": values.get("return_token_ids", False),
        "return_prompt_token_ids": values.get("return_prompt_token_ids", False),
        "return_meta_info": values.get("return_meta_info", False),
        "return_routed_experts": values.get("return_routed_experts", False),
        "tokens_as_ids": values.get("return_tokens_as_token_ids", False),
        "rid": values.get("rid"),
        "session": values.get("session_id"),
        "sampling": sampling_params(values, max_tokens=max_tokens),
        "engine": _engine_fields(values),
        "unknown": unknown,
    }


def _in_sglangs_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` in SGLang's names. Raises InvalidRequest if two names are given with different values."""
    renamed = dict(values)
    for name, sglangs in _VLLM_NAMES.items():
        if name in renamed:
            value = renamed.pop(name)
            if renamed.setdefault(sglangs, value) != value:
                raise InvalidRequest(
                    name, f"'{name}' and '{sglangs}' are two names of one parameter, but they differ."
                )
    return renamed


def _engine_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the engine. As in SGLang, ``cache_salt`` becomes the beginning of ``extra_key``."""
    fields = {name: values[name] for name in _ENGINE if name in values}
    salt = fields.pop("cache_salt", None)
    if salt is not None:
        fields["extra_key"] = salt + fields.get("extra_key", "")
    return fields
