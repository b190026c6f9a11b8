"""Histories of chats, and chats that go on from them."""

from __future__ import annotations

from typing import Any

ASK: dict[str, Any] = {"return_token_ids": True, "max_tokens": 60}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(document: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The message of a choice as clients send it back."""
    message = document["choices"][index]["message"]
    return {"role": "assistant", "content": message["content"]}


def is_continued(document: dict[str, Any], before: dict[str, Any], index: int = 0) -> bool:
    """Return True when the prompt begins with all tokens of ``before``, and check that the reply says so."""
    known = before["prompt_token_ids"] + before["choices"][index]["token_ids"]
    continued: bool = document["prompt_token_ids"][: len(known)] == known
    assert continued == (document["history"] in ("exact", "restored"))
    return continued
