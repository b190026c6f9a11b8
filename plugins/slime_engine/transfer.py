"""Handover of a sequence from a prefill to a decode engine, over HTTP, in a bootstrap room of the prefill engine.

The decode engine requests the room at the bootstrap address. The prefill engine answers when it has sampled the first
token, and ends its sequence. A real engine transfers the KV cache; the embedded engine transfers that token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import httpx
import orjson

from slime_engine.room import Room
from slime_engine.sequence import ScoredToken, Sequence

__all__ = ["PATH", "Handover", "TransferFailed", "fetch"]

PATH = "/kv_transfer/{room:int}"


class TransferFailed(Exception):
    """The prefill engine did not hand over the sequence."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The first token of a sequence: sampled by the prefill engine, under ``version``, after ``input_ids``.

    ``cached_tokens``: tokens of the prompt that the prefill engine had in its cache.
    """

    input_ids: list[int]
    token_id: int
    logprob: float
    top: list[ScoredToken]
    version: str
    cached_tokens: int

    @classmethod
    def of(cls, sequence: Sequence) -> Handover:
        """Return the handover of ``sequence``, which has exactly one sampled token."""
        entry, tops = sequence.entry, sequence.unsent_tops
        return cls(
            sequence.input_ids,
            entry.output_ids[0],
            entry.output_logprobs[0],
            tops[0] if tops else [],
            entry.versions[0][0],
            sequence.cached_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def fetch(room: Room) -> Handover:
    """Wait until the prefill engine hands over in ``room``, and return the handover. Raises TransferFailed."""
    if room.port is None:
        raise TransferFailed("bootstrap_port is not given, and the embedded engine has no default.")
    url = f"http://{room.host}:{room.port}{PATH.partition('{')[0]}{room.number}"
    query = {} if room.dp_rank is None else {"dp_rank": room.dp_rank}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            answer = await client.get(url, params=query)
            answer.raise_for_status()
            told = orjson.loads(answer.content)
    except (httpx.HTTPError, orjson.JSONDecodeError) as error:
        raise TransferFailed(f"The prefill engine did not hand over: {type(error).__name__}") from None
    told["top"] = [tuple(one) for one in told["top"]]
    return Handover(**told)
