"""Routed experts of each sampled token, as trainers read them that know vLLM-like gateways."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from slime_openai.requests.fields import is_int
from slime_openai.responses.outputs import Output

__all__ = ["routing_matrices"]


def routing_matrices(output: Output, start: int) -> list[str] | None:
    """For each of ``output.ids`` the experts that computed it: base64 of int32, ``[num_layers, top_k]``.

    That is the row of the token before it, whose computation it was sampled from. Empty where the engine's rows, which
    begin at token ``start`` of the prompt, leave it out. None: the engine told none, or not the rows that there are.
    """
    meta, count = output.meta, len(output.ids)
    told = meta.get("routed_experts")
    prompt: Any = meta.get("prompt_tokens")
    start = meta.get("routed_experts_start_len") or start
    if not isinstance(told, str) or not is_int(prompt) or not is_int(start):
        return None
    rows, length = prompt + count - 1 - start, len(told) // 4 * 3 - told[-2:].count("=")
    if rows < 1 or length < 1 or length % rows or len(told) % 4:
        return None
    size, known = length // rows, min(count, rows)
    try:
        return [""] * (count - known) + _cut(told, length - known * size, size)
    except ValueError:
        return None


def _cut(encoded: str, begin: int, size: int) -> list[str]:
    """Pieces of ``size`` bytes of what ``encoded`` is, from byte ``begin`` on, each of them encoded.

    Three bytes are four letters. So pieces may often be cut out of the text, which is ten times as fast. That matters:
    a long answer of a large model has 80 MB of it.
    """
    if begin % 3 == size % 3 == 0:
        step = size // 3 * 4
        return [encoded[at : at + step] for at in range(begin // 3 * 4, len(encoded), step)]
    data = b64decode(encoded[begin // 3 * 4 :])
    return [b64encode(data[at : at + size]).decode() for at in range(begin % 3, len(data), size)]
