"""The body of ``/generate``, parsed once: one frozen GenerateRequest per sequence to generate."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slime_engine.errors import BadRequest
from slime_engine.fields import JSONObject, boolean, integer, is_int
from slime_engine.room import Room
from slime_engine.sampling import SamplingParams, parse_sampling_params

__all__ = ["GenerateBody", "GenerateRequest", "new_rid", "parse_generate"]

#: Fields that SGLang supports and this engine refuses: to ignore them would give wrong answers.
_UNSUPPORTED = ("input_embeds", "token_ids_logprob", "lora_path", "session_params", "custom_logit_processor")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate, from ``text`` or from ``input_ids``. Exactly one of these two is None."""

    rid: str
    text: str | None
    input_ids: list[int] | None
    params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_prompt_token_ids: bool = False
    room: Room | None = None
    dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """All sequences of one HTTP request.

    ``is_list``: the reply is a JSON array; if the reply is a stream, each event has the ``index`` of its sequence.
    """

    requests: list[GenerateRequest]
    is_list: bool

    @property
    def stream(self) -> bool:
        return self.requests[0].stream


def new_rid() -> str:
    return uuid.uuid4().hex


def parse_generate(body: JSONObject, vocab_size: int, obeys: Collection[str] = ()) -> GenerateBody:
    """Return requests in reply order: all samples of prompt 0, then of prompt 1, ... Raises BadRequest.

    Fields that this engine neither serves nor refuses (priority, image_data, ...) are ignored, as SGLang ignores
    unknown fields. ``obeys``: see :class:`slime_engine.language.Vocabulary`.
    """
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            raise BadRequest(f"{name} is not supported by the embedded engine.")
    if body.get("return_hidden_states"):
        raise BadRequest("The server is not configured to return hidden states.")
    prompts, is_batch = _prompts(body, vocab_size)
    count = len(prompts)
    rids = _rids(body, count, is_batch)
    params = [_params(item, vocab_size, obeys) for item in _each(body, "sampling_params", count)]
    if len({one.n for one in params}) > 1:
        raise BadRequest("The number of samples n must be the same for all prompts of a batch.")
    samples = params[0].n
    requests = [
        _request(rids[i], prompts[i], params[i], {**body, **_item(body, i, count)}) for i in range(count)
    ]
    if samples > 1:
        requests = [one for request in requests for one in _samples(request, samples)]
    is_list = is_batch or samples > 1
    return GenerateBody(_in_rooms(requests, body, is_list), is_list)


def _request(rid: str, prompt: Any, params: SamplingParams, body: JSONObject) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        text=prompt if isinstance(prompt, str) else None,
        input_ids=None if isinstance(prompt, str) else prompt,
        params=params,
        stream=boolean(body, "stream"),
        return_logprob=boolean(body, "return_logprob"),
        logprob_start_len=integer(body, "logprob_start_len", -1, minimum=-1),
        top_logprobs_num=integer(body, "top_logprobs_num", 0, minimum=0),
        return_text_in_logprobs=boolean(body, "return_text_in_logprobs"),
        return_routed_experts=boolean(body, "return_routed_experts"),
        routed_experts_start_len=integer(body, "routed_experts_start_len", 0, minimum=0),
        return_prompt_token_ids=boolean(body, "return_prompt_token_ids"),
        dp_rank=_rank(body, "routed_dp_rank", _rank(body, "data_parallel_rank")),
    )


def _rank(body: JSONObject, name: str, default: int | None = None) -> int | None:
    return default if body.get(name) is None else integer(body, name, 0, minimum=0)


def _in_rooms(requests: list[GenerateRequest], body: JSONObject, is_list: bool) -> list[GenerateRequest]:
    """Give each sequence its room. A single number is the first room; later rooms count up from it, as in SGLang."""
    rooms = body.get("bootstrap_room")
    if rooms is None:
        return requests
    count = len(requests)
    if is_int(rooms):
        rooms = [rooms + i for i in range(count)]
    if not isinstance(rooms, list) or len(rooms) != count or not all(is_int(room) for room in rooms):
        raise BadRequest(
            "bootstrap_room must be a number, or for a batch a list of numbers, one for each sequence."
        )
    if len({*rooms}) < count:
        raise BadRequest("The rooms in bootstrap_room must differ.")
    if not is_list and isinstance(body["bootstrap_room"], list):
        raise BadRequest("bootstrap_room must be a number, since the request is not a batch.")
    hosts, ports = (_each(body, f"bootstrap_{name}", count) for name in ("host", "port"))
    rank = _rank(body, "disagg_prefill_dp_rank")
    places = zip(hosts, ports, rooms, strict=True)
    return [
        replace(request, room=Room(*place, rank)) for request, place in zip(requests, places, strict=True)
    ]


def _samples(request: GenerateRequest, n: int) -> Iterator[GenerateRequest]:
    """Yield ``n`` requests with new rids. Sample ``i`` gets the seed plus ``i``; with one seed, all would be equal."""
    for i in range(n):
        seed = request.params.sampling_seed
        params = replace(request.params, sampling_seed=None if seed is None else seed + i)
        yield replace(request, rid=new_rid(), params=params)


def _prompts(body: JSONObject, vocab_size: int) -> tuple[list[Any], bool]:
    """Return the prompts, and True if they came as a batch."""
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise BadRequest("Either text or input_ids should be provided, and not both.")
    if text is not None:
        if isinstance(text, str):
            return [text], False
        if not isinstance(text, list) or not text or not all(isinstance(one, str) for one in text):
            raise BadRequest("text must be a string or a list of strings that is not empty.")
        return text, True
    if not isinstance(input_ids, list) or not input_ids:
        raise BadRequest("input_ids must be a list of token ids or a list of such lists, and not be empty.")
    is_batch = isinstance(input_ids[0], list)
    batch = input_ids if is_batch else [input_ids]
    for ids in batch:
        if not isinstance(ids, list) or not all(is_int(one) and 0 <= one < vocab_size for one in ids):
            raise BadRequest(f"input_ids must be token ids in [0, {vocab_size - 1}].")
    return batch, is_batch


def _rids(body: JSONObject, count: int, is_batch: bool) -> list[str]:
    rid = body.get("rid")
    if rid is None:
        return [new_rid() for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
    if (
        is_batch
        and isinstance(rid, list)
        and len(rid) == count
        and all(isinstance(r, str) and r for r in rid)
    ):
        return rid
    raise BadRequest("rid must be a string, or for a batch a list of strings, one for each prompt.")


def _each(body: JSONObject, name: str, count: int) -> list[Any]:
    """Return ``count`` values; a single value applies to all."""
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{name} must be one value or a list of {count}, got a list of {len(value)}.")
    return value


def _item(body: JSONObject, index: int, count: int) -> dict[str, Any]:
    """Return one prompt's values of the fields that may be lists in a batch."""
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "routed_experts_start_len")
    return {name: _each(body, name, count)[index] for name in names}


def _params(value: object, vocab_size: int, obeys: Collection[str]) -> SamplingParams:
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"sampling_params must be an object, got {value!r}.")
    return parse_sampling_params(value or {}, vocab_size, obeys)
