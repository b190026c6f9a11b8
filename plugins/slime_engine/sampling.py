"""Sampling parameters as SGLang has them, and the choice of one token from logits.

The steps are those of SGLang 0.5. Penalties and biases change the logits. A grammar and ``min_new_tokens`` exclude
tokens. The temperature divides the logits. The reported log-probabilities are the log-softmax of the result. ``top_k``,
``top_p`` and ``min_p`` then limit the draw, but do not change the reported log-probabilities. Temperature 0 takes the
likeliest token, and reports the log-probabilities of temperature 1.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from slime_engine.errors import BadRequest
from slime_engine.fields import JSONObject, boolean, integer, is_int, number, string, strings
from slime_engine.grammars import BoolArray, Grammar, GrammarKind
from slime_engine.language import FloatArray
from slime_engine.model import log_softmax

__all__ = ["SamplingParams", "choose", "parse_sampling_params", "uniform"]

_GREEDY_BELOW = 1e-6
_NO_LIMIT = 1 << 30
_UNSUPPORTED = ("structural_tag", "stop_regex", "custom_params")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. ``temperature`` 0: greedy.

    ``may_shorten``: the client gave no ``max_new_tokens``, so the limit may be cut to what the context can hold.
    A stream sends a chunk every ``stream_interval`` tokens.
    """

    max_new_tokens: int = 128
    may_shorten: bool = True
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    sampling_seed: int | None = None
    n: int = 1
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


def parse_sampling_params(body: JSONObject, vocab_size: int, obeys: Collection[str] = ()) -> SamplingParams:
    """Parse sampling parameters. Null means the default; for ``max_new_tokens`` it means no limit. Raises BadRequest.

    ``obeys``: parameters that the model honours by itself, without the sampler's help.
    """
    grammars = get_args(GrammarKind)
    known = {*SamplingParams.__slots__, *grammars} - {"may_shorten", "grammar"}
    for name, value in body.items():
        if value is None or name in known or name in obeys or name == "spaces_between_special_tokens":
            continue
        if name in _UNSUPPORTED:
            raise BadRequest(f"{name} is not supported by the embedded engine.")
        raise BadRequest(f"Unknown sampling parameter {name!r}. Known: {', '.join(sorted(known))}.")
    without_limit = "max_new_tokens" in body and body["max_new_tokens"] is None
    max_new_tokens = integer(body, "max_new_tokens", _NO_LIMIT if without_limit else 128, minimum=0)
    min_new_tokens = integer(body, "min_new_tokens", 0, minimum=0)
    if min_new_tokens > max_new_tokens:
        raise BadRequest(
            f"min_new_tokens must be in [0, max_new_tokens({max_new_tokens})], got {min_new_tokens}."
        )
    temperature = number(body, "temperature", 1.0, low=0.0, high=math.inf)
    top_p = number(body, "top_p", 1.0, low=0.0, high=1.0)
    top_k = integer(body, "top_k", -1)
    repetition_penalty = number(body, "repetition_penalty", 1.0, low=0.0, high=2.0)
    if not math.isfinite(temperature):
        raise BadRequest("temperature must be a non-negative finite number.")
    if top_p == 0.0 or repetition_penalty == 0.0:
        raise BadRequest("top_p and repetition_penalty must be greater than 0.")
    if top_k < 1 and top_k != -1:
        raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    seed = body.get("sampling_seed")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        may_shorten=body.get("max_new_tokens") is None,
        min_new_tokens=min_new_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=number(body, "min_p", 0.0, low=0.0, high=1.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, low=-2.0, high=2.0),
        presence_penalty=number(body, "presence_penalty", 0.0, low=-2.0, high=2.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(body, vocab_size),
        stop=strings(body, "stop"),
        stop_token_ids=_token_ids(body, "stop_token_ids"),
        ignore_eos=boolean(body, "ignore_eos"),
        skip_special_tokens=boolean(body, "skip_special_tokens", True),
        no_stop_trim=boolean(body, "no_stop_trim"),
        stream_interval=integer(body, "stream_interval", 1, minimum=1),
        sampling_seed=None if seed is None else integer(body, "sampling_seed", 0),
        n=integer(body, "n", 1, minimum=1),
        grammar=_grammar(body, [name for name in grammars if name not in obeys]),
    )


def _grammar(body: JSONObject, kinds: Sequence[GrammarKind]) -> Grammar | None:
    given: list[Grammar] = [(kind, text) for kind in kinds if (text := string(body, kind)) is not None]
    if len(given) > 1:
        raise BadRequest("Only one of regex, json_schema, or ebnf can be set.")
    return given[0] if given else None


def _token_ids(body: JSONObject, name: str) -> frozenset[int]:
    value = body.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(is_int(item) for item in value):
        raise BadRequest(f"{name} must be a list of token ids, got {value!r}.")
    return frozenset(value)


def _logit_bias(body: JSONObject, vocab_size: int) -> dict[int, float]:
    value = body.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"logit_bias must be an object, got {value!r}.")
    biases = {}
    for key in value:
        if not key.isdecimal() or int(key) >= vocab_size:
            raise BadRequest(f"logit_bias must have keys in [0, {vocab_size - 1}], got {key}.")
        biases[int(key)] = number(value, key, 0.0, low=-1e6, high=1e6)
    return biases


def choose(
    logits: FloatArray,
    params: SamplingParams,
    produced: Mapping[int, int],
    forbidden: frozenset[int],
    luck: float,
    allowed: BoolArray | None = None,
) -> tuple[int, FloatArray]:
    """Return the next token, and the log-probabilities of all tokens. Changes ``logits`` in place.

    ``produced`` counts the tokens generated so far, for the penalties. Ids that are ``forbidden``, or not ``allowed``
    by a grammar, get probability 0. ``luck`` in [0, 1) selects the token, except at temperature 0.
    """
    if params.penalises and produced:
        _penalise(logits, params, produced)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if allowed is not None:
        logits[: len(allowed)][~allowed] = -math.inf
        logits[len(allowed) :] = -math.inf
    if forbidden:
        logits[list(forbidden)] = -math.inf
    if params.temperature == 0:
        logprobs = log_softmax(logits)
        return int(logprobs.argmax()), logprobs
    logits /= params.temperature
    logprobs = log_softmax(logits)
    probabilities = np.exp(logprobs)
    if params.top_k != -1 or params.top_p < 1 or params.min_p > 0:
        _truncate(probabilities, params)
    cumulated = probabilities.cumsum()
    total = float(cumulated[-1])
    aim = min(luck * total, math.nextafter(total, 0.0))  # at ``total``, the search would find no token
    token_id = int(cumulated.searchsorted(aim, side="right"))
    return token_id, logprobs


#: Largest absolute value of a logit after penalties. In probabilities it acts like infinity, but sums stay finite.
_MAX_PENALISED = 1e6


def _penalise(logits: FloatArray, params: SamplingParams, produced: Mapping[int, int]) -> None:
    ids = np.fromiter(produced.keys(), np.int64, len(produced))
    counts = np.fromiter(produced.values(), np.float64, len(produced))
    seen = logits[ids] - params.frequency_penalty * counts - params.presence_penalty
    scale = params.repetition_penalty
    with np.errstate(over="ignore"):  # a scale near 0 gives infinity, which is clipped below
        scaled = np.where(seen > 0, seen / scale, seen * scale)
    logits[ids] = np.clip(scaled, -_MAX_PENALISED, _MAX_PENALISED)


def _truncate(probabilities: FloatArray, params: SamplingParams) -> None:
    """Set to 0 the probabilities that ``top_k``, ``top_p`` or ``min_p`` exclude from the full distribution."""
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    excluded = ranked.cumsum() - ranked > params.top_p
    if params.top_k != -1:
        excluded[params.top_k :] = True
    excluded |= ranked < ranked[0] * params.min_p
    probabilities[order[excluded]] = 0.0


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the arguments alone, so that a generation can be repeated.

    ``position`` is the token's index in the whole context. A request may continue a partial output with the same seed.
    Then each token is drawn with the number that the first request would have used for it.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed % (1 << 64), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
