"""What a ``/generate`` body asks for, and the body that the engine gets instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Ask", "read_ask", "with_ids"]

#: Fields that put more into an engine's context than the text says: such a request is passed on as it is.
_MORE_THAN_TEXT = ("input_ids", "input_embeds", "image_data", "video_data", "audio_data", "session_params")


@dataclass(frozen=True, slots=True)
class Ask:
    """Texts to continue, ``copies`` times each. ``batch``: the body has a list."""

    texts: tuple[str, ...]
    batch: bool
    copies: int


def read_ask(body: Any) -> Ask | str:
    """What ``body`` asks for, or why it is to be passed on untouched (in one word, for counting).

    Malformed bodies are among these: the worker says in its own words what is wrong with them.
    """
    if not isinstance(body, dict):
        return "malformed"
    for name in _MORE_THAN_TEXT:
        if body.get(name) is not None:
            return name
    text = body.get("text")
    batch = isinstance(text, list)
    texts = tuple(text) if isinstance(text, list) else (text,)
    if not texts or not all(isinstance(item, str) and item for item in texts):
        return "malformed"
    parameters = body.get("sampling_params")
    first = parameters[0] if isinstance(parameters, list) and parameters else parameters
    copies = first.get("n") if isinstance(first, dict) else None
    if copies is None:
        copies = 1
    if not isinstance(copies, int) or copies < 1:
        return "malformed"
    return Ask(texts, batch, copies)


def with_ids(body: dict[str, Any], ids: Sequence[list[int]], *, batch: bool) -> dict[str, Any]:
    """``body`` with ``input_ids`` instead of ``text``, and logprobs unless the client has forbidden them."""
    changed = {name: value for name, value in body.items() if name != "text"}
    changed["input_ids"] = list(ids) if batch else ids[0]
    if changed.get("return_logprob") is None:
        changed["return_logprob"] = True
    return changed
