"""Prompts as tokens: the stored tokens up to the end of a recorded turn, and the tokens of the new text behind them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from router_core.types import Tokenizer
from slime_openai.errors import InvalidRequest
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.conversation import Conversation
from slime_openai.prompts.history import Asking
from slime_openai.prompts.parents import Parents, as_recorded
from slime_openai.prompts.question import Question
from slime_openai.prompts.rendering import Renderer
from slime_openai.requests.messages import Message, for_template

if TYPE_CHECKING:
    from slime_radix_cache.contracts import TextEncoder

__all__ = ["HistoryMode", "Origin", "Prompt", "Prompts"]

#: The tokens of an old turn if the template would write the turn differently. ``exact``: the sampled tokens.
#: ``template``: the tokens of the template's text.
HistoryMode = Literal["exact", "template"]
#: The source of the first tokens. ``exact``: the turn of the last answer. ``restored``: the same turn, although the
#: template writes the client's messages differently than the recorded ones. ``template``: an earlier turn, and then the
#: template's text; or only the template's text, although a turn was found. ``fresh``: no turn can be continued.
#: ``given``: the client gave all ids.
Origin = Literal["exact", "restored", "template", "fresh", "given"]

#: Of a prompt that the client gave as ids, only this many ids at the end are decoded: enough to see if the prompt ends
#: within thoughts. If the prompt ends with the beginning of the answer, all ids are decoded.
_END = 64
#: Members of an assistant's message without calls.
_SPOKEN = {"role", "content", "reasoning_content"}
#: The cached ids of ends of turns are dropped after this many look-ups.
_CLEARED_EVERY = 101
#: A content of one message may have this many characters, even if the encoder's limit is lower.
_LONGEST_CONTENT = 1 << 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids up to the end of ``parent``, and then the packed ids ``asked``. ``text``: the text of ``asked``.

    If the client gave the ids, ``text`` may be only the text of their end. ``begun``: the recorded answer that the
    client wants to have continued, if there is one.
    """

    parent: Turn | None
    asked: bytes
    text: str
    origin: Origin
    begun: Message | None = None

    def ids(self) -> bytes:
        """Return all packed ids. O(tokens)."""
        return (self.parent.ids() if self.parent is not None else b"") + self.asked


class Prompts:
    """Makes prompts for conversations."""

    def __init__(
        self,
        renderer: Renderer,
        encoder: TextEncoder,
        tokenizer: Tokenizer,
        parents: Parents,
        mode: HistoryMode,
    ) -> None:
        self.traits = renderer.traits
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._parents = parents
        self._mode = mode
        self._ends: dict[str, bytes] = {}
        self._ends_asked = 0

    async def of(self, question: Question, chat: Conversation, asking: Asking) -> Prompt:
        """Return the prompt for ``question``. ``chat``: the template's input. Raises BadRequest."""
        prompt = await self._of(question, chat, asking)
        asking.continues_from(prompt.parent)
        return prompt

    def check_contents(self, messages: Sequence[Message]) -> None:
        """Raise InvalidRequest for a content that is longer than any context, before it is copied.

        The limit is generous, since the template may leave out most of a content.
        """
        longest = max(_LONGEST_CONTENT, self._encoder.max_characters)
        for place, message in enumerate(messages):
            size = len(message.content or "")
            if size > longest:
                param = f"messages.[{place}].content"
                wanted = f"wanted at most {longest} characters, got {size}"
                raise InvalidRequest(param, f"Invalid value for '{param}': {wanted}.")

    def given(self, ids: Sequence[int], asking: Asking, *, continues: bool) -> Prompt:
        """Return the prompt that a client gave as ``ids``. Nothing is rendered or looked up.

        ``continues``: the end of the prompt is the beginning of the answer.
        """
        asking.continues_from(None)
        end = ids if continues else ids[-_END:]
        text = self._tokenizer.decode(end, skip_special_tokens=False)
        return Prompt(None, array("i", ids).tobytes(), text, "given")

    async def _of(self, question: Question, chat: Conversation, asking: Asking) -> Prompt:
        found = await self._parents.of(question, chat)
        asking.continues_from(found.turn if found is not None else None)
        if found is None:
            return await self._from_start(chat, "fresh")
        turn = found.turn
        known: Origin = "exact" if found.is_verbatim else "restored"
        if chat.continues and turn.count == len(chat.messages):
            within = _within(turn, known)
            return within if within is not None else await self._from_start(chat, "fresh")
        origin: Origin = "template" if _has_unrecorded_answer(question, turn.count) else known
        if self._mode == "template":
            return await self._as_rendered(chat, turn, origin)
        suffix = await self._suffix(chat, turn, turn.count - 1, is_known=found.is_verbatim)
        if suffix is None:
            return await self._from_start(chat, "fresh")
        return await self._behind(turn, suffix, origin, chat.client)

    async def _from_start(self, chat: Conversation, origin: Origin) -> Prompt:
        text = await self._renderer.render(chat)
        ids = await self._encoder.encode(text, begins=True, client=chat.client)
        return Prompt(None, ids, text, origin)

    async def _behind(self, turn: Turn, suffix: str, origin: Origin, client: str | None) -> Prompt:
        ids = await self._encoder.encode(suffix, begins=False, client=client) if suffix else b""
        return Prompt(turn, ids, suffix, origin)

    async def _suffix(self, chat: Conversation, turn: Turn, place: int, *, is_known: bool) -> str | None:
        """Return the template's text behind the reply of ``turn``, without the part that the model generated.

        ``place``: index of the reply; ``is_known``: the messages before the reply were rendered for ``turn``. Return
        None when the template refuses a part, when it does not show the end of the reply, or when the end of the turn
        depends on later messages.
        """
        renderer, last = self._renderer, for_template(chat.messages[place])
        try:
            behind = await renderer.behind(chat, place, is_known=is_known)
            end = renderer.end_of_turn(chat)
            if end is not None and behind is not None and last.keys() <= _SPOKEN and behind.startswith(end):
                return await self._not_generated(turn, end) + behind[len(end) :]
            # The text behind the reply if no message follows it.
            alone = await renderer.behind(chat.until(place, last), place, is_known=is_known)
            if not last.get("tool_calls"):
                end = alone
            elif end is None:  # between the calls and the end of the turn there is more markup
                silent = chat.until(place, {"role": "assistant", "content": ""})
                end = await renderer.behind(silent, place, is_known=is_known)
        except InvalidRequest:
            return None  # if the template refuses the whole conversation, the next rendering raises
        if alone is None or end is None or behind is None:
            return None
        if not behind.startswith(alone) or not alone.endswith(end):
            return None
        return await self._not_generated(turn, end) + behind[len(alone) :]

    async def _not_generated(self, turn: Turn, end: str) -> str:
        """Return ``end``, the template's end of a turn, without the tokens that the model generated.

        If the model ended its turn with another special token than the template, the template's token is left out, too.
        Otherwise the turn would end twice.
        """
        generated = turn.sampled[len(turn.sampled) - 4 * turn.hidden :]
        if not generated:
            return end
        ids = await self._ids_of(end)
        if ids.startswith(generated):
            return end.removeprefix(turn.ending)
        first = list(array("i", ids[:4]))
        if turn.closed and first and not self._tokenizer.decode(first, skip_special_tokens=True):
            return end.removeprefix(self._tokenizer.decode(first, skip_special_tokens=False))
        return end

    async def _ids_of(self, end: str) -> bytes:
        """Return the ids of ``end``, an end of a turn. The ids are cached, since most turns end alike.

        The cache is cleared now and then, since the encoder may have corrected its ids.
        """
        self._ends_asked += 1
        if self._ends_asked % _CLEARED_EVERY == 0:
            self._ends.clear()
        ids = self._ends.get(end)
        if ids is None:
            ids = self._ends[end] = await self._encoder.encode(end, begins=False)
        return ids

    async def _as_rendered(self, chat: Conversation, turn: Turn, origin: Origin) -> Prompt:
        """Continue the latest turn that the template writes as recorded. Without such a turn, encode the whole text."""
        text = await self._renderer.render(as_recorded(chat, turn))
        for one in turn.chain():
            known = one.whole_text()
            if text.startswith(known):
                known_origin: Origin = origin if one is turn else "template"
                return await self._behind(one, text[len(known) :], known_origin, chat.client)
        return Prompt(
            None, await self._encoder.encode(text, begins=True, client=chat.client), text, "template"
        )


def _has_unrecorded_answer(question: Question, count: int) -> bool:
    """Return True when an answer that is not recorded stands behind the first ``count`` messages."""
    behind = question.messages[count : -1 if question.continues else None]
    return any(message.role == "assistant" for message in behind)


def _within(turn: Turn, origin: Origin) -> Prompt | None:
    """Return a prompt that ends where the reply of ``turn`` ended for the client; None if no token ends there."""
    said, text = turn.asked + turn.sampled, turn.text
    is_seen = turn.ending and (turn.reply.content or "").endswith(turn.ending)  # no_stop_trim
    if not is_seen:
        if turn.ending and not turn.hidden:
            return None
        said = said[: len(said) - 4 * turn.hidden]
        text = text.removesuffix(turn.ending)
    return Prompt(turn.parent, said, text, origin, turn.reply)
