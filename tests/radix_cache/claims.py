"""Helpers for the tests of claims: requests of every way, and the tokens that a session is told it sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from deadlines import HANG_S
from radix_cache.scripted import Client

__all__ = [
    "AS_IDS",
    "NEXT",
    "PROMPT",
    "STREAMED",
    "ask",
    "assert_owned",
    "in_pieces",
    "session_of",
    "trained",
]

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
AS_IDS = pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])


async def ask(
    client: Client,
    prompt: str | list[str] | list[int],
    ids: list[int] | tuple[int, bytes],
    session: str = "",
    *,
    streamed: bool = False,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> bytes:
    """Generate ``ids`` from a text, from texts or from given ids; the bytes of the answer."""
    client.engine.script.append(ids)
    key = "input_ids" if isinstance(prompt, list) and isinstance(prompt[0], int) else "text"
    named = {"x-session-id": session} if session else {}
    document = {key: prompt, "stream": streamed, **body}
    answer = await client.running.client.post("/generate", json=document, headers=named | (headers or {}))
    assert answer.status_code == 200, answer.text
    return answer.content


def in_pieces(client: Client, text: str) -> list[int]:
    """``text`` in more tokens than the tokenizer makes of it."""
    encode = client.engine.tokenizer.encode
    pieces = [token for letter in text for token in encode(letter)]
    assert pieces != encode(text)
    return pieces


def trained(answer: dict[str, Any]) -> list[int]:
    """The tokens with mask 1."""
    return [token for token, mask in zip(answer["tokens"], answer["loss_mask"], strict=True) if mask]


async def session_of(client: Client, session: str) -> dict[str, Any]:
    """The document of ``/trajectories``; a session of which nothing is kept has no record and is not complete."""
    answer = await client.running.client.get(f"/trajectories/{session}")
    if answer.status_code == 404:
        return {"complete": False, "trajectories": []}
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def assert_owned(client: Client, session: str, text: str, *own: list[int], never: list[int]) -> None:
    """Of ``text``, ``session`` is told exactly its ``own`` samples, as a fact; no record of it has ``never``."""
    answer = await client.retrieve(text, session_id=session)
    assert (answer["exact"], answer["inexact_reason"]) == (True, None)
    assert trained(answer) == [token for sample in own for token in sample]
    for record in (await session_of(client, session))["trajectories"]:
        assert set(never).isdisjoint(trained(record))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until ``holds`` says so, for some seconds."""
    with anyio.fail_after(HANG_S):
        while True:
            if await holds():
                return
            await anyio.sleep(0.005)
