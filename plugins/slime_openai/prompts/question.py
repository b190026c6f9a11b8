"""A conversation that waits for an answer, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_openai.prompts.identity import Key, answers_of, beginning, keys, next_key
from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.chat_request import ChatRequest
from slime_openai.requests.messages import Message

__all__ = ["Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an answer. ``keys``: its key before the first message, and behind each message.

    ``continues``: the last message is the beginning of the answer. ``samples``: the number of answers that the client
    wants.
    """

    messages: tuple[Message, ...]
    keys: list[Key]
    session: str | None
    continues: bool
    traits: TemplateTraits
    stop_token_ids: Sequence[int] = ()
    samples: int = 1

    @classmethod
    def of(
        cls, request: ChatRequest, session: str | None, traits: TemplateTraits, known: Sequence[Key] = ()
    ) -> Question:
        """Make the question of ``request`` in ``session``. ``traits``: traits of the model's template.

        ``known``: the first keys of a request with the same first messages. These keys are not used if that request had
        other tools or variables.
        """
        start = beginning(request.tools.shown, request.template_kwargs)
        found = keys(known if known and known[0] == start else [start], request.messages, traits)
        stops = request.sampling.get("stop_token_ids", ())
        return cls(request.messages, found, session, request.continue_final_message, traits, stops, request.n)

    @property
    def asked(self) -> int:
        """The number of messages before the answer. A last message that the answer continues belongs to the answer."""
        return len(self.messages) - self.continues

    @property
    def place(self) -> Key:
        """The key of the messages before the answer."""
        return self.keys[len(self.messages) - self.continues]

    def answers(self, first: int, last: int) -> bytes:
        """Return :func:`answers_of` for the messages from index ``first`` up to, not including, ``last``."""
        if last - first == 1 and self.messages[first].role != "assistant":
            return b""  # the usual case: the turn asks with one message
        return answers_of(self.messages[first:last], self.traits)

    def with_reply(self, reply: Message, begun: Message | None) -> tuple[Key, int, Message]:
        """Return the key of the conversation with ``reply``, the number of its messages, and the whole answer.

        ``begun``: the recorded answer that ``reply`` continues, if there is one.
        """
        whole = reply
        if self.continues:
            content = f"{self.messages[-1].content or ''}{reply.content or ''}"
            whole = reply._replace(content=content)
            if begun is not None and reply.reasoning is None:
                whole = whole._replace(reasoning=begun.reasoning)
        return next_key(self.place, whole, self.traits), self.asked + 1, whole
