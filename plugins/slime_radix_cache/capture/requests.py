"""Reading of ``/generate`` bodies, and rewriting of them for the engine."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from router_core.errors import BadRequest
from router_core.exchange import Exchange, check_length
from slime_sglang.request_fields import unknown_field

__all__ = [
    "MALFORMED",
    "GenerationRequest",
    "check_size",
    "handles_aborts",
    "longest_ids",
    "read_generation",
    "request_for_one",
    "rewritten",
    "rids_of",
]

#: The reason to pass on a malformed request untouched: the engine will refuse it.
MALFORMED = "malformed"
#: A ``doubt`` (see GenerationRequest) shows at most this many characters of an unknown field's name.
_SHOWN = 64
#: Types of a list of ids.
_LISTS = (list, array)
#: Fields that put more than the prompt into an engine's context. A request with one of them is passed on untouched.
_MORE_THAN_PROMPT = ("input_embeds", "image_data", "video_data", "audio_data", "session_params")


#: Fields that may be lists in a batch, with a value for each prompt.
_PER_PROMPT = (
    "input_ids",
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_hidden_states",
    "lora_path",
    "custom_logit_processor",
    "extra_key",
    "priority",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)


class GenerationRequest(NamedTuple):
    """The prompts of a request: texts, or packed token ids. Each prompt is to be continued ``copies`` times.

    Ids that the client sent go to the engine unchanged. ``batch``: the body has a list of prompts. ``adapters``: the
    LoRA adapter for each prompt. ``doubt``: why no answer can be exact (an unknown field), or None.
    """

    prompts: tuple[str, ...] | tuple[bytes, ...]
    batch: bool
    copies: int
    adapters: tuple[str | None, ...]
    doubt: str | None

    @property
    def sequences(self) -> int:
        """The number of sequences to sample."""
        return len(self.prompts) * self.copies

    @property
    def has_ids(self) -> bool:
        """True when the client sent token ids."""
        return isinstance(self.prompts[0], bytes)


def check_size(body: Any, most: int) -> None:
    """Raise BadRequest if ``body`` asks for more than ``most`` sequences."""
    copies = (_copies(body.get("sampling_params")) if isinstance(body, dict) else None) or 1
    prompts = len(_prompts(body))
    if prompts * copies > most:
        raise BadRequest(
            f"wanted at most {most} sequences in one request"
            f" (--max-sequences-per-request), got {prompts} prompts with n = {copies}"
        )


def longest_ids(body: Any) -> int:
    """Return the number of ids in the longest prompt of ``body`` that is given as ids; 0 if there is none."""
    return max([len(one) for one in _prompts(body) if isinstance(one, _LISTS)], default=0)


def _prompts(body: Any) -> Sequence[Any]:
    if not isinstance(body, dict):
        return ()
    prompts = body.get("text") or body.get("input_ids")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        return prompts
    return (prompts,)


def read_generation(body: Any) -> GenerationRequest | str:
    """Return the request in ``body``, or the reason to pass the body on untouched (one word, for counting).

    Malformed bodies are passed on too: the worker refuses them with its own message. Raises BadRequest if the name
    of an adapter is too long.
    """
    if not isinstance(body, dict):
        return MALFORMED
    for name in _MORE_THAN_PROMPT:
        if body.get(name):
            return name
    text, ids = body.get("text"), body.get("input_ids")
    copies = _copies(body.get("sampling_params"))
    if (text is None) == (ids is None) or copies is None:
        return MALFORMED
    prompts = _texts(text) if ids is None else _packed(ids)
    if not prompts:
        return MALFORMED
    parameters = body.get("sampling_params")
    if isinstance(parameters, list) and len(parameters) != len(prompts):
        return MALFORMED
    batch = isinstance(text, list) or (ids is not None and isinstance(ids[0], _LISTS))
    adapters = _adapters(body.get("lora_path"), len(prompts))
    if adapters is None:
        return MALFORMED
    unknown = unknown_field(body)
    doubt = f"unknown_field:{unknown[:_SHOWN]}" if unknown is not None else None
    return GenerationRequest(prompts, batch, copies, adapters, doubt)


def _adapters(paths: Any, prompts: int) -> tuple[str | None, ...] | None:
    """Return the adapter of each prompt, or None if ``paths`` is malformed. As in SGLang, "" is the base model."""
    if paths is None:
        return (None,) * prompts
    each = paths if isinstance(paths, list) else [paths] * prompts
    if len(each) != prompts or not all(isinstance(one, str | None) for one in each):
        return None
    for one in {*each} - {None}:
        check_length('"lora_path"', one)
    return tuple(sys.intern(one) if one else None for one in each)


def _copies(parameters: Any) -> int | None:
    first = parameters[0] if isinstance(parameters, list) and parameters else parameters
    copies = first.get("n") if isinstance(first, dict) else None
    if copies is None:
        return 1
    return copies if isinstance(copies, int) and copies > 0 else None


def _texts(text: Any) -> tuple[str, ...] | None:
    if isinstance(text, str):
        return (text,) if text else None
    texts = text if isinstance(text, list) else [text]
    return tuple(texts) if all(isinstance(one, str) and one for one in texts) else None


def _packed(ids: Any) -> tuple[bytes, ...] | None:
    if not isinstance(ids, _LISTS) or not ids:
        return None
    try:
        lists = ids if isinstance(ids[0], _LISTS) else [ids]
        packed = tuple((one if isinstance(one, array) else array("i", one)).tobytes() for one in lists)
    except (TypeError, OverflowError):
        return None
    return packed if all(packed) else None


def rewritten(
    body: dict[str, Any], wanted: GenerationRequest, prompts: Sequence[npt.NDArray[np.int32]]
) -> dict[str, Any] | None:
    """Return ``body`` with ``prompts`` instead of texts, and a request for logprobs unless the client declined them.

    Return None if ``body`` needs no change.
    """
    changed = {name: value for name, value in body.items() if name != "text"}
    if isinstance(wanted.prompts[0], str):
        changed["input_ids"] = list(prompts) if wanted.batch else prompts[0]
    elif body.get("return_logprob") is not None:
        return None
    if changed.get("return_logprob") is None:
        changed["return_logprob"] = True
    return changed


def rids_of(body: dict[str, Any], wanted: GenerationRequest) -> list[str | None]:
    """Return, for each sequence of the answer, its ``rid``, or None if the engine chooses the rid."""
    rid = body.get("rid") if wanted.copies == 1 else None
    count = wanted.sequences
    if wanted.batch and isinstance(rid, str):
        return [f"{rid}_{place}" for place in range(count)]
    given = rid if wanted.batch and isinstance(rid, list) and len(rid) == count else [rid] * count
    return [name if isinstance(name, str) else None for name in given]


def request_for_one(body: dict[str, Any], wanted: GenerationRequest, number: int) -> dict[str, Any]:
    """Return the body of a request for sequence ``number`` alone. ``body``: the whole request, with ``input_ids``."""
    place = number // wanted.copies
    alone = dict(body)
    if wanted.batch:
        for name in _PER_PROMPT:
            if isinstance(alone.get(name), list):
                alone[name] = alone[name][place]
        if isinstance(body.get("rid"), str):
            alone["rid"] = f"{body['rid']}_{place}"  # the engine's own name for this prompt
    if wanted.copies > 1:
        alone.pop("rid", None)  # the engine chooses a rid for each sample
        alone["sampling_params"] = {**alone["sampling_params"], "n": 1}
    return alone


def handles_aborts(exchange: Exchange, wanted: GenerationRequest) -> bool:
    """Return True if the client sent token ids, to ``/generate`` or in a chat or completion request.

    Such a client handles aborts itself.
    """
    if exchange.parent is None:
        return wanted.has_ids
    body = exchange.parent.request.json_object_or_none() or {}
    return body.get("input_ids") is not None or (wanted.has_ids and isinstance(body.get("prompt"), _LISTS))
