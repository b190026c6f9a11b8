"""The question that a conversation asks, and the place of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_openai.prompts.identity import Key, answers_of, beginning, keys, next_key
from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.chat_request import ChatRequest
from slime_openai.requests.messages import Message

__all__ = ["Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for its next message; ``keys`` has the one before the first message and behind each."""

    messages: tuple[Message, ...]
    keys: list[Key]
    session: str | None
    continues: bool
    traits: TemplateTraits
    stop_token_ids: Sequence[int] = ()

    @classmethod
    def of(cls, request: ChatRequest, session: str | None, traits: TemplateTraits) -> Question:
        """The question of ``request`` in ``session`` to a model whose template has these ``traits``."""
        start = beginning(request.tools.shown, request.template_kwargs)
        known = [start, *keys(start, request.messages, traits)]
        stops = request.sampling.get("stop_token_ids", ())
        return cls(request.messages, known, session, request.continue_final_message, traits, stops)

    @property
    def asked(self) -> int:
        """The number of messages that are answered: a last one that has only begun belongs to the answer."""
        return len(self.messages) - self.continues

    @property
    def place(self) -> Key:
        """The key of these messages."""
        return self.keys[self.asked]

    def answers(self, first: int, last: int) -> bytes:
        """Digest of all that assistants say in these messages, to the letter."""
        return answers_of(self.messages[first:last], self.traits)

    def with_reply(self, reply: Message, begun: Message | None) -> tuple[Key, int, Message]:
        """The key of the conversation with ``reply``, the number of its messages, and the last one.

        ``begun``: the answer that it goes on with, if the router knows that.
        """
        whole = reply
        if self.continues:
            content = f"{self.messages[-1].content or ''}{reply.content or ''}"
            whole = replace(reply, content=content)
            if begun is not None and reply.reasoning is None:
                whole = replace(whole, reasoning=begun.reasoning)
        return next_key(self.place, whole, self.traits), self.asked + 1, whole
