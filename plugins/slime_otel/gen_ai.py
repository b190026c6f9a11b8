"""Attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from router_core.request import Request
from slime_sglang.generation import at_generation

__all__ = ["Attributes", "request_attributes", "span_name", "usage_attributes"]

Attributes: TypeAlias = dict[str, str | int | float | bool]

_OPERATION = "gen_ai.operation.name"
_MODEL = "gen_ai.request.model"
#: The conventions' name of the operation at each path. A generation at any other path is ``generate_content``.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
}
#: Parameters, by the names of OpenAI and of SGLang.
_NUMBERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reused_tokens": "slime.usage.reused_tokens",
}
_MAX_CHARS = 256


def request_attributes(request: Request) -> Attributes:
    """Return the attributes of a generation; none for another request. No prompt is among them."""
    if not at_generation(request):
        return {}
    found: Attributes = {
        _OPERATION: _OPERATIONS.get(request.path, "generate_content"),
        "gen_ai.provider.name": "sglang",
    }
    # Parsing a large body here would hold up the event loop, so attributes from a large body are left out.
    document = None if request.is_long_work else request.json_object_or_none()
    if document is not None:
        model, sampling = document.get("model"), document.get("sampling_params")
        if isinstance(model, str):
            found[_MODEL] = model[:_MAX_CHARS]
        for fields in (document, sampling if isinstance(sampling, dict) else {}):
            for name, attribute in _NUMBERS.items():
                value = fields.get(name)
                if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63:
                    found[attribute] = value
    return found


def span_name(attributes: Attributes, otherwise: str) -> str:
    """Return ``chat MODEL`` or the like for the ``attributes`` of a generation, else ``otherwise``."""
    if _OPERATION not in attributes:
        return otherwise
    return f"{attributes[_OPERATION]} {attributes.get(_MODEL, '')}".rstrip()


def usage_attributes(tokens: Mapping[str, Any]) -> Attributes:
    """Return the attributes for ``tokens``, numbers of tokens by name; None: the number is unknown."""
    return {_USAGE[name]: number for name, number in tokens.items() if name in _USAGE and number is not None}
