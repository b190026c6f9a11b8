"""Requests that continue a generation from its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["can_go_on", "continuation", "max_new_tokens"]

_MAX_NEW_TOKENS = 128  # SGLang's default
#: Parameters that an engine applies to all tokens of a response. It would apply them to a continuation alone.
_NEEDS_THE_BEGINNING = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params")
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
#: Fields that add output for each token, or change how tokens are sampled. They prevent a continuation.
_MORE_PER_TOKEN = ("return_hidden_states", "custom_logit_processor")


def can_go_on(body: dict[str, Any]) -> bool:
    """Return True when a continuation of ``body`` samples like an uninterrupted generation."""
    parameters = body.get("sampling_params")
    if not isinstance(parameters, dict | None) or any(body.get(name) for name in _MORE_PER_TOKEN):
        return False
    if np.ndim(body["input_ids"][0]):
        return False  # a batch, even of a single prompt
    known = parameters or {}
    return not any(known.get(name) for name in _NEEDS_THE_BEGINNING) and all(
        known.get(name) in (None, neutral) for name, neutral in _PENALTIES.items()
    )


def max_new_tokens(body: dict[str, Any]) -> int | None:
    """Return the largest number of tokens of the response; None if only the context limits it."""
    told = (body.get("sampling_params") or {}).get("max_new_tokens", _MAX_NEW_TOKENS)
    return told if isinstance(told, int) else None


def continuation(
    body: dict[str, Any], sampled: Sequence[int], rid: str | None, row_start: int
) -> dict[str, Any]:
    """Return the body of a request that continues the generation of ``body`` after the ids ``sampled``.

    ``body`` has ``input_ids``. ``rid``: the id of the new request, or None to keep that of ``body``. ``row_start``: the
    first token whose routed experts are not known.
    """
    changed = dict(body)
    if body.get("return_routed_experts"):
        changed["routed_experts_start_len"] = row_start
    if rid is not None:
        changed["rid"] = rid
    parameters = dict(body.get("sampling_params") or {})
    limit = max_new_tokens(body)
    if limit is not None:
        parameters["max_new_tokens"] = limit - len(sampled)
    if parameters.get("min_new_tokens"):
        parameters["min_new_tokens"] = max(0, parameters["min_new_tokens"] - len(sampled))
    known = np.asarray(body["input_ids"], np.int32)
    changed["input_ids"] = np.concatenate((known, np.asarray(sampled, np.int32)))
    changed["sampling_params"] = parameters
    if changed.get("logprob_start_len") is not None:
        changed["logprob_start_len"] = -1  # the first attempt has the logprobs of the prompt
    return changed
