"""Routed experts of each sampled token, in the form that trainers read from vLLM-like gateways."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from slime_openai.requests.fields import is_int
from slime_openai.responses.outputs import Output

__all__ = ["routing_matrices"]


def routing_matrices(output: Output, start: int) -> list[str] | None:
    """Return for each id in ``output.ids`` the experts that computed it: base64 of int32, ``[num_layers, top_k]``.

    An id is sampled from the computation of the token before it, so it gets that token's experts. The engine's rows
    begin at token ``start`` of the prompt. A token without a row gets "". None: there are no rows, or their size is
    wrong.
    """
    meta, count = output.meta, len(output.ids)
    encoded = meta.get("routed_experts")
    prompt: Any = meta.get("prompt_tokens")
    start = meta.get("routed_experts_start_len") or start
    if not isinstance(encoded, str) or not is_int(prompt) or not is_int(start):
        return None
    rows, length = prompt + count - 1 - start, len(encoded) // 4 * 3 - encoded[-2:].count("=")
    if rows < 1 or length < 1 or length % rows or len(encoded) % 4:
        return None
    size, known = length // rows, min(count, rows)
    try:
        return [""] * (count - known) + _cut(encoded, length - known * size, size)
    except ValueError:
        return None


def _cut(encoded: str, begin: int, size: int) -> list[str]:
    """Split the bytes in the base64 text ``encoded``, from ``begin`` on, into pieces of ``size`` bytes, each as base64.

    Three bytes are four letters of base64. So pieces can often be cut out of the text, which is ten times as fast as
    decoding. A long answer of a large model has 80 MB of this text.
    """
    if begin % 3 == size % 3 == 0:
        step = size // 3 * 4
        return [encoded[at : at + step] for at in range(begin // 3 * 4, len(encoded), step)]
    data = b64decode(encoded[begin // 3 * 4 :])
    return [b64encode(data[at : at + size]).decode() for at in range(begin % 3, len(data), size)]
