"""The recorded turn that a conversation continues, if it is certain which turn this is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_openai.errors import InvalidRequest
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.conversation import Conversation
from slime_openai.prompts.history import Alike, History
from slime_openai.prompts.question import Question
from slime_openai.prompts.rendering import Renderer
from slime_openai.requests.messages import Message
from slime_openai.responses.evidence import Ownership

__all__ = ["Parent", "Parents", "as_recorded"]


@dataclass(frozen=True, slots=True)
class Parent:
    """A turn to continue. ``is_verbatim``: the template writes the client's and the recorded messages alike."""

    turn: Turn
    is_verbatim: bool


class Parents:
    """Finds the parent of a conversation in ``history``.

    ``ownership``: says if a session may continue the turn of another session.

    Clients change white space, thoughts and the format of JSON in answers. Turns are looked up by keys of their
    messages, and these keys ignore such changes. So several turns may match. The template renders the client's
    messages, and, for each matching turn, the same messages with the recorded answers. The parent is a turn that gives
    the same text as the client's messages. If there is no such turn, but all matching turns give one and the same text,
    or the template refuses all of them, the most similar turn is the parent. Otherwise a turn for a shorter beginning
    of the conversation is looked for.
    """

    def __init__(self, history: History, renderer: Renderer, ownership: Ownership) -> None:
        self._history = history
        self._renderer = renderer
        self._ownership = ownership

    async def of(self, question: Question, chat: Conversation) -> Parent | None:
        """Return the parent for ``question``, or None. ``chat``: the input of the template. Raises InvalidRequest."""
        sent: str | None = None
        if not await self._history.load(question):
            return None  # a turn that could not be loaded may match a longer beginning
        found = self._history.find(question.keys[1:], question.place, question.session, question.answers)
        for each in found:
            alike = await self._allowed(each, question.session)
            if question.continues and each.turns[0].count == len(question.messages):
                begun = question.messages[-1].content
                alike = [turn for turn in alike if turn.reply.content == begun]
            if not alike:
                continue
            if len(alike) > 1:
                alike.sort(key=lambda turn: turn.likeness(question.messages), reverse=True)
            if _is_verbatim(alike[0], question.messages):
                return Parent(alike[0], is_verbatim=True)
            if sent is None:
                sent = await self._renderer.render(chat)
            parent = await self._proved(alike, question, chat, sent)
            if parent is not None:
                return parent
        return None

    async def _allowed(self, alike: Alike, session: str | None) -> list[Turn]:
        if session is None or not alike.needs_check:
            return alike.turns
        return [turn for turn in alike.turns if await self._ownership.may_take(turn.ids(), session)]

    async def _proved(
        self, alike: Sequence[Turn], question: Question, chat: Conversation, sent: str
    ) -> Parent | None:
        """Return the first of ``alike`` whose recorded answers make ``chat`` render to ``sent``.

        If there is none, return the first of ``alike`` if all of them give one and the same text, or if the template
        refuses all of them. Otherwise return None.
        """
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
            return None  # the template refuses the recorded answers, but not the client's


def as_recorded(chat: Conversation, turn: Turn) -> Conversation:
    """Return ``chat`` with the recorded replies of ``turn`` and the turns before it."""
    messages = list(chat.messages)
    for one in turn.chain():
        messages[one.count - 1] = one.reply
    return replace(chat, messages=messages)


def _is_verbatim(turn: Turn, messages: Sequence[Message]) -> bool:
    """Return True when all answers came back unchanged, so that any template writes them in the same way."""
    for one in turn.chain():
        recorded, sent = one.reply, messages[one.count - 1]
        if recorded != sent and _filled(recorded) != _filled(sent):
            return False
    return True


def _filled(message: Message) -> Message:
    """Return ``message``; missing content counts as empty."""
    return message._replace(content=message.content or "")
