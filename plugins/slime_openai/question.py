"""What is asked of a conversation, and where its answer belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_openai.chat_request import ChatRequest
from slime_openai.identity import Key, beginning, keys, next_key
from slime_openai.messages import Message

__all__ = ["Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for its next message; ``keys`` has the one before the first message and behind each."""

    messages: tuple[Message, ...]
    keys: list[Key]
    session: str | None
    continues: bool
    stop_token_ids: Sequence[int] = ()

    @classmethod
    def of(cls, request: ChatRequest, session: str | None) -> Question:
        """What ``request`` asks, in ``session``."""
        start = beginning(request.tools.shown, request.template_kwargs)
        known = [start, *keys(start, request.messages)]
        stops = request.sampling.get("stop_token_ids", ())
        return cls(request.messages, known, session, request.continue_final_message, stops)

    def with_reply(self, reply: Message) -> tuple[Key, int, Message]:
        """The key of the conversation with ``reply``, the number of its messages, and the last one."""
        if not self.continues:
            return next_key(self.keys[-1], reply), len(self.messages) + 1, reply
        begun = self.messages[-1].content or ""
        whole = replace(reply, content=f"{begun}{reply.content or ''}")
        return next_key(self.keys[-2], whole), len(self.messages), whole
