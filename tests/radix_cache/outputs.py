"""Engines' outputs with changed figures, whole and streamed."""

from __future__ import annotations

from typing import Any

import orjson

from radix_cache.claims import PROMPT, ask
from radix_cache.scripted import Client


def output(client: Client, ids: list[int], **changes: Any) -> dict[str, Any]:
    """Return the engine's output of ``ids``; ``changes`` of None leave a key out."""
    logprobs = [[-0.5, token, None] for token in ids]
    meta = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "completion_tokens": len(ids),
        "output_token_logprobs": logprobs,
    }
    told = {"text": client.engine.tokenizer.decode(ids), "output_ids": ids, "meta_info": meta} | changes
    return {key: value for key, value in told.items() if value is not None}


def events(*told: dict[str, Any]) -> tuple[int, bytes]:
    """A stream of them."""
    return 200, b"".join(b"data: %s\n\n" % orjson.dumps(one) for one in told) + b"data: [DONE]\n\n"


async def stream(client: Client, session: str, told: tuple[int, bytes], **body: Any) -> None:
    client.engine.media_type = "text/event-stream"
    await ask(client, PROMPT, told, session, streamed=True, **body)
    client.engine.media_type = "application/json"
