"""Sessions on the embedded engine, and the engine's own journal of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_engine.tokenizer import EngineTokenizer
from slime_testing import Running

__all__ = ["RECORDING", "SYSTEM", "branched", "entries", "follow_up", "say", "tokenizer_of", "user"]

RECORDING = ("--plugin", "engine", "--engine-seed", "3", "--plugin", "radix_cache")
SYSTEM = "<|im_start|>system\nYou help. ☔<|im_end|>\n"


def user(question: str) -> str:
    """A user's message, and the beginning of the answer."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def follow_up(question: str) -> str:
    """The next message, after an answer whose text does not show its end."""
    return f"<|im_end|>\n{user(question)}"


async def say(
    running: Running,
    session: str,
    prompt: str | Sequence[int],
    tokens: int = 24,
    temperature: float = 0.8,
    **body: Any,
) -> str:
    """Generate in ``session``, and return the answer's text."""
    form: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    params = {"max_new_tokens": tokens, "temperature": temperature}
    form |= {"session_id": session, "sampling_params": params}
    answer = await running.client.post("/generate", json={**form, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def branched(
    running: Running, session: str, system: str = SYSTEM, tokens: int = 24, temperature: float = 0.8
) -> None:
    """Five turns: a root, two answers to one prompt under two weight versions, and one after each of these."""
    manner: dict[str, Any] = {"tokens": tokens, "temperature": temperature}
    root = system + user("Tell me about the harbour.")
    root += await say(running, session, root, **manner) + follow_up("And then?")
    left = root + await say(running, session, root, **manner)
    updated = await running.client.post(
        "/update_weights_from_disk", json={"model_path": "w", "weight_version": "7"}
    )
    assert updated.status_code == 200
    right = root + await say(running, session, root, **manner)
    await say(running, session, left + follow_up("Why?"), **manner)
    await say(running, session, right + follow_up("Why?"), **manner)


async def entries(running: Running) -> list[dict[str, Any]]:
    """Return the engine's journal: what it consumed and sampled, request by request."""
    (engine,) = (await running.client.get("/list_workers")).json()["urls"]
    found: list[dict[str, Any]] = (await running.client.get(f"{engine}/journal")).json()["entries"]
    return found


def tokenizer_of(running: Running) -> EngineTokenizer:
    """Return the tokenizer that the engine lends to the router."""
    tokenizer = running.router.components.get("tokenizer")
    assert isinstance(tokenizer, EngineTokenizer)
    return tokenizer
