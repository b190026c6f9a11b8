"""The input of a chat template, and shorter inputs with the same text at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_openai.prompts.locality import Proof
from slime_openai.prompts.searches import UNKNOWN, Searched
from slime_openai.requests.messages import Message, for_template, template_role

__all__ = ["Conversation", "shortened"]

#: Stands for all messages that are left out. Most searches find it if no later message is what they search for.
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "?"}
_ASSISTANT = Searched("assistant", UNKNOWN)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template, see ``for_template``. ``continues``: the last message is the beginning of the answer.

    ``size``: bytes of the input's JSON, roughly. ``client``: the client for which a long rendering runs in FairThreads.
    """

    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continues: bool = False
    size: int = 0
    client: str | None = None

    def until(self, place: int, last: Mapping[str, Any]) -> Conversation:
        """Return the conversation of the messages before ``place`` and then ``last``, without a generation prompt."""
        return replace(
            self, messages=[*self.messages[:place], last], generation_prompt=False, continues=False
        )

    def since(self, place: int) -> Conversation:
        """Return the conversation of the messages from ``place`` on."""
        messages = [for_template(message) for message in self.messages[place:]]
        spoken = sum([len(message["content"]) for message in messages])
        calls = self.tools or [message for message in messages if "tool_calls" in message]
        return replace(self, messages=messages, size=self.size if calls else min(spoken, self.size))


def shortened(whole: Conversation, place: int, proof: Proof) -> tuple[Conversation, int] | None:
    """Leave out messages that do not matter to the text behind the message at ``place``.

    ``proof``: the proof that the template is local. Return the shorter conversation and the index of the message in it.
    Return None if a search of the template fails. Also return None if, from ``place`` on, a search finds different
    messages in the two conversations. O(messages) for a template with searches, else O(messages behind ``place``).
    """
    shorter = whole.since(place - 1)
    if proof.search is None:
        return shorter, 1
    shorter = replace(shorter, messages=[_QUESTION, *shorter.messages])
    found, again = (proof.search.found([*map(_searched, each.messages)]) for each in (whole, shorter))
    if found is None or again is None:
        return None
    left_out = place - 2
    # Only the rounds of the template's loop for the message at ``place`` and for later messages matter. If both found
    # indexes are before this message, they compare alike with the indexes of all these rounds.
    same = [
        index == other + left_out or (index < place and other < 2)
        for index, other in zip(found, again, strict=True)
    ]
    return (shorter, 2) if all(same) else None


def _searched(message: Message | Mapping[str, Any]) -> Message | Searched:
    """Return ``message`` for a search, which must not read what an assistant said: the renderer puts marks there."""
    if isinstance(message, Message) and message.role == "assistant":
        return _ASSISTANT
    if not isinstance(message, Message):
        role, content = message["role"], message["content"]
    elif message.role in ("tool", "user") and message.content is not None:
        return message
    else:
        role, content = template_role(message.role), message.content or ""
    return _ASSISTANT if role == "assistant" else Searched(role, content)
