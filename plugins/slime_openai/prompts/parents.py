"""The turn that a conversation goes on from: the one that is meant, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_openai.errors import InvalidRequest
from slime_openai.prompts.history import History, Turn
from slime_openai.prompts.question import Question
from slime_openai.prompts.rendering import Conversation, Renderer
from slime_openai.requests.messages import Message, for_template

__all__ = ["Parent", "Parents", "as_recorded"]


@dataclass(frozen=True, slots=True)
class Parent:
    """``is_verbatim``: the template writes the client's messages and those that were recorded in the same way."""

    turn: Turn
    is_verbatim: bool


class Parents:
    """Finds them in ``history``.

    Clients change white space, thoughts and the spelling of JSON in answers, so a turn is found without them. Then
    the text that ``renderer`` makes decides: the turn is meant with whose answers it is the same. Where none is, and
    more than one could be meant, no turn is proved, and the one before it is looked for.
    """

    def __init__(self, history: History, renderer: Renderer) -> None:
        self._history = history
        self._renderer = renderer

    async def of(self, question: Question, chat: Conversation) -> Parent | None:
        """The parent for ``question``, which a template gets as ``chat``. Raises InvalidRequest."""
        sent: str | None = None
        found = self._history.find(question.keys[1:], question.place, question.session, question.answers)
        for alike in found:
            if question.continues and alike[0].count == len(question.messages):
                begun = question.messages[-1].content
                alike = [turn for turn in alike if turn.reply.content == begun]
                if not alike:
                    continue
            alike.sort(key=lambda turn: turn.likeness(question.messages), reverse=True)
            if _is_verbatim(alike[0], question.messages):
                return Parent(alike[0], is_verbatim=True)
            if sent is None:
                sent = await self._renderer.render(chat)
            parent = await self._meant(alike, question, chat, sent)
            if parent is not None:
                return parent
        return None

    async def _meant(
        self, alike: Sequence[Turn], question: Question, chat: Conversation, sent: str
    ) -> Parent | None:
        """Of turns that are ``alike``, likely ones first, that of which the template makes the text ``sent``."""
        texts: dict[tuple[tuple[int, Message], ...], str | None] = {}
        for turn in alike:
            replies = tuple((one.count, one.reply) for one in turn.chain())
            if replies not in texts:
                texts[replies] = await self._text(as_recorded(chat, turn))
            if texts[replies] == sent:
                return Parent(turn, is_verbatim=True)
        return Parent(alike[0], is_verbatim=False) if len(set(texts.values())) == 1 else None

    async def _text(self, chat: Conversation) -> str | None:
        try:
            return await self._renderer.render(chat)
        except InvalidRequest:
            return None  # it writes what the client made of the answers, and not the answers


def as_recorded(chat: Conversation, turn: Turn) -> Conversation:
    """``chat``, in which ``turn`` and those before it say what they said."""
    messages = list(chat.messages)
    for one in turn.chain():
        messages[one.count - 1] = for_template(one.reply)
    return replace(chat, messages=messages)


def _is_verbatim(turn: Turn, messages: Sequence[Message]) -> bool:
    """True when all answers came back to the letter, so that no template can tell."""
    for one in turn.chain():
        reply, message = one.reply, messages[one.count - 1]
        if replace(message, content=message.content or "") != replace(reply, content=reply.content or ""):
            return False
    return True
