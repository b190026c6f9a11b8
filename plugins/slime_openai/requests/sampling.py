"""Sampling parameters, OpenAI's and SGLang's own, as the ``sampling_params`` of ``/generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_openai.errors import InvalidRequest, wrong
from slime_openai.requests.fields import (
    Reader,
    boolean,
    encoded,
    integer,
    mapping,
    nested,
    number,
    one_of,
    string,
    strings,
    token_ids,
)

__all__ = ["SAMPLING", "grammar_of", "sampling_params"]

_INT64 = 2**63
#: The maximum number of stop strings of a request. OpenAI allows 4.
_MOST_STOPS = 256
_ANY_OBJECT = '{"type":"object"}'


def _top_k(param: str, value: Any) -> int:
    """Read -1 and 0 as all tokens, as vLLM does; SGLang knows only -1."""
    return int(integer(-1)(param, value)) or -1


def _logit_bias(param: str, value: Any) -> dict[str, float]:
    """Read ``{"token id": bias}``. The ids stay strings, as in JSON: SGLang expects strings."""
    biases: dict[str, float] = mapping(param, value)
    read = number(-100, 100)
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal()):
            raise wrong(param, "token ids as keys", key)
        read(f"{param}.{key}", bias)
    return biases


def _response_format(param: str, value: Any) -> str | None:
    """Return the JSON schema that the text of the answer must fit; None if any text is allowed."""
    kind = mapping(param, value).get("type")
    one_of("text", "json_object", "json_schema")(f"{param}.type", kind)
    if kind != "json_schema":
        return _ANY_OBJECT if kind == "json_object" else None
    place = f"{param}.json_schema"
    described = mapping(place, value.get("json_schema"))
    string(f"{place}.name", described.get("name"))
    return encoded(f"{place}.schema", mapping(f"{place}.schema", described.get("schema")))


def _stops(param: str, value: Any) -> list[str]:
    """Read stop strings. Their number is limited: each piece of an answer is searched for all of them."""
    if isinstance(value, list) and len(value) > _MOST_STOPS:
        raise wrong(param, f"at most {_MOST_STOPS} stop strings", value)
    return strings(param, value)


#: Readers of the parameters that affect what is sampled, or how its text is made.
SAMPLING: Mapping[str, Reader] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": _top_k,
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0, 2, above=True),
    "logit_bias": _logit_bias,
    "seed": integer(-_INT64, _INT64 - 1),
    "n": integer(1, 128),
    "max_tokens": integer(1),
    "min_tokens": integer(0),
    "stop": _stops,
    "stop_token_ids": token_ids,
    "ignore_eos": boolean,
    "no_stop_trim": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "custom_params": nested,
    "response_format": _response_format,
    "json_schema": string,
    "regex": string,
    "ebnf": string,
}

_SGLANG_NAMES = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "response_format": "json_schema",
}
_GRAMMARS = ("response_format", "json_schema", "regex", "ebnf")


def grammar_of(values: Mapping[str, Any]) -> str | None:
    """Return the parameter that binds the whole text to a grammar, or None. Raises InvalidRequest for two or more."""
    given = [name for name in _GRAMMARS if values.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"Wanted one grammar for the text, got {' and '.join(given)}.")
    return given[0] if given else None


def sampling_params(values: Mapping[str, Any], *, max_tokens: int | None) -> dict[str, Any]:
    """Return ``sampling_params``, ready to send, for the parameters in ``values``.

    ``max_tokens``: the limit if the request sets none; None: as many tokens as fit into the context. The limit is sent
    even if it is null: without the field ``/generate`` stops after 128 tokens.

    Raises InvalidRequest for contradictions.
    """
    limits = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens",
            "'max_tokens' and 'max_completion_tokens' are two names of one limit; "
            f"wanted one of them or equal ones, got {values['max_tokens']} and {values['max_completion_tokens']}.",
        )
    limit = limits.pop() if limits else max_tokens
    if limit is not None and values.get("min_tokens", 0) > limit:
        raise wrong("min_tokens", f"at most the limit of {limit} tokens", values["min_tokens"])
    grammar_of(values)
    params = {"max_new_tokens": limit}
    for name, value in values.items():
        if value is not None and name in SAMPLING:
            params[_SGLANG_NAMES.get(name, name)] = value
    return params
