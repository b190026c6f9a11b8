"""The body of ``/v1/completions``, read once. A parameter is honoured, without effect, refused, or unknown."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_openai.errors import MissingParameter, UnsupportedParameter, wrong
from slime_openai.requests.fields import Reader, boolean, integer, read_parameters, refused, text, token_ids
from slime_openai.requests.options import COMMON, NO_EFFECT, REFUSED, Options, common_options

__all__ = ["CompletionRequest", "Prompt", "read_completion"]

#: Text, or token ids.
Prompt = str | Sequence[int]

#: OpenAI's default of ``max_tokens``.
_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Options):
    """One or more prompts, each continued ``n`` times.

    ``logprobs``: the number of alternatives to each token; None: no logprobs. ``max_tokens`` may be 0 only with
    ``echo``: such a request asks about the prompt, and generates nothing.
    """

    prompts: tuple[Prompt, ...]
    echo: bool = False
    logprobs: int | None = None


def _prompts(param: str, value: Any) -> tuple[Prompt, ...]:
    """Read one prompt or a list of prompts. A list of integers is one prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list | array):
        return tuple(
            [_prompt(f"{param}.[{index}]", item, type(value[0])) for index, item in enumerate(value)]
        )
    return (_prompt(param, value, type(value)),)


def _prompt(param: str, value: Any, kind: type) -> Prompt:
    if kind is str:
        return text(param, value)
    if not isinstance(value, list | array) or not value:
        raise wrong(param, "text, or a list of at least one token id", value)
    return token_ids(param, value)


_alternatives = integer(0, 20)


def _logprobs(param: str, value: Any) -> int | None:
    """Read the number of alternatives. True is 1, as in vLLM and SGLang: gateways send a chat's ``logprobs`` here."""
    if isinstance(value, bool):
        return 1 if value else None
    count: int = _alternatives(param, value)
    return count


#: The parameters of a completion request that are honoured.
HONOURED: Mapping[str, Reader] = {
    **COMMON,
    "add_special_tokens": boolean,
    "best_of": integer(1),
    "echo": boolean,
    "logprobs": _logprobs,
    "max_completion_tokens": integer(1),
    "max_tokens": integer(0),
    "prompt": _prompts,
}
_PARAMETERS: Mapping[str, Reader] = {
    **HONOURED,
    **NO_EFFECT,
    **REFUSED,
    "input_ids": refused("send the token ids as 'prompt'"),
    "suffix": refused("only text behind the prompt can be generated"),
}


def read_completion(body: Any) -> CompletionRequest:
    """Return the request in ``body``, which may be any JSON. Raises InvalidRequest."""
    values, unknown = read_parameters(body, _PARAMETERS)
    if "prompt" not in values:
        raise MissingParameter("prompt", "text or token ids to continue")
    echo = values.get("echo", False)
    if values.get("max_tokens") == 0 and not echo:
        raise wrong("max_tokens", "an integer of at least 1, unless 'echo' is true", 0)
    n = values.get("n", 1)
    if values.get("best_of", n) != n or values.get("best_of", 1) > 1:
        raise UnsupportedParameter("best_of", "answers are not ranked; ask for all of them with 'n'")
    if not values.get("add_special_tokens", True) and isinstance(values["prompt"][0], str):
        unknown["add_special_tokens"] = False  # text prompts always get special tokens, as in the engine
    return CompletionRequest(
        prompts=values["prompt"],
        echo=echo,
        logprobs=values.get("logprobs"),
        **common_options(values, unknown, max_tokens=_MAX_TOKENS),
    )
