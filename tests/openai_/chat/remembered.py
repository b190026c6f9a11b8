"""Histories of chats, and chats that go on from them."""

from __future__ import annotations

from typing import Any

from deadlines import until
from openai_.chat.chatting import Chat
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.limits import Limits

ASK: dict[str, Any] = {"return_token_ids": True, "max_tokens": 60}
#: Their tokens are drawn from many spellings.
WORDS = "Two words, café 日本語."


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


async def demote_all(chat: Chat) -> None:
    """Demote all that no request holds, and wait until it is noted."""
    cold: ColdTrajectories = chat.running.router.components.get("ownership")
    kept = cold._trajectories
    limits, kept._limits = kept._limits, Limits(tokens=1)
    cold.check()
    await until(lambda: not kept.overdue(1))
    kept._limits = limits
    await cold._saver.writer.flush()


async def asked(chat: Chat, *messages: Any, session: str | None = "s", **more: Any) -> Any:
    body = {"messages": list(messages), **ASK, **more}
    return await chat.post(**body, **({} if session is None else {"session_id": session}))
