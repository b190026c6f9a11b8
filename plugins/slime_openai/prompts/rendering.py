"""Rendering of messages to text by the model's chat template."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from router_core.errors import SettingsError
from router_core.types import Tokenizer
from slime_fairness.turns import FairThreads
from slime_openai.errors import InvalidRequest
from slime_openai.prompts.conversation import Conversation, shortened
from slime_openai.prompts.direct_template import DirectTemplate
from slime_openai.prompts.locality import Proof, prove, trials
from slime_openai.prompts.template_traits import TemplateTraits, probe
from slime_openai.requests.call_arguments import as_written
from slime_openai.requests.messages import for_template

__all__ = ["Renderer"]

logger = logging.getLogger(__name__)

#: Conversations of more bytes than this are rendered in a thread, so that streams are not delayed.
_LONG_BODY = 1 << 14
#: A template's searches run in a thread if there are more messages than this.
_MANY_MESSAGES = 1 << 10
#: Marks a place in a message; it is random, so no client can send it.
_MARK = f"mark{secrets.token_hex(12)}"
_TOOL = {
    "type": "function",
    "function": {"name": "probed", "parameters": {"type": "object", "properties": {}}},
}
#: Beginnings of trial conversations. An assistant's message follows each. A template may refuse some of them.
_BEFORE: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"role": "user", "content": "?"}],
    [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}],
    [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": "?"},
    ],
)
#: The end of a turn is cached for at most this many combinations of variables.
_MOST_ENDS = 256
#: The end of a turn is not cached for variables whose text has this many characters or more.
_LONGEST_KEY = 1024
#: One in this many shortened conversations is rendered as a whole, too, to compare the texts.
_COMPARED_EVERY = 101


@dataclass(frozen=True, slots=True)
class _Form:
    """The form in which a template reads messages with calls.

    Arguments are an object or text. Missing content is "" or None.
    """

    arguments_as_text: bool = False
    content_as_none: bool = False

    def of(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``message`` in this form."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        changed = dict(message)
        if self.content_as_none and not message["content"]:
            changed["content"] = None
        if self.arguments_as_text:
            changed["tool_calls"] = [{**call, "function": _with_text(call["function"])} for call in calls]
        return changed


_FORMS = (_Form(), _Form(arguments_as_text=True), _Form(content_as_none=True), _Form(True, True))


class Renderer:
    """The chat template in ``source``, or the tokenizer's. Raises SettingsError without a template. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, source: str | None = None, threads: FairThreads | None = None
    ) -> None:
        self._threads = threads if threads is not None else FairThreads()
        known = getattr(tokenizer, "chat_template", None)
        if not hasattr(tokenizer, "apply_chat_template"):
            raise SettingsError("the tokenizer has no method apply_chat_template, which chats need")
        if source is None and known is None:
            raise SettingsError("the tokenizer has no chat template; give one with --chat-template FILE")
        self._template = DirectTemplate(tokenizer, source)
        self.source: str = source if source is not None else _text_of(known)
        self._ends: dict[str, str | None] = {}
        self._form = _FORMS[0]
        self._form = self._form_of_calls()
        self.traits: TemplateTraits = probe(self._probed)
        self._proof = self._proved(source if source is not None else known)
        self._shortened = -1

    async def render(self, conversation: Conversation) -> str:
        """Return the text of ``conversation``. Raises InvalidRequest."""
        if conversation.size > _LONG_BODY:
            return await self._threads.run(lambda: self._render(conversation), conversation.client)
        return self._render(conversation)

    async def behind(self, conversation: Conversation, place: int, *, is_known: bool = False) -> str | None:
        """Return the rendered text of ``conversation`` after the content of the assistant's message at index ``place``.

        If the template does not show this content, the text begins within the arguments of the message's last call.

        ``is_known``: the template has rendered the messages before this one. A local template (see ``locality``) then
        usually renders only the last of those messages, and what follows. Return None when the template does not show
        where the message ends. Raises InvalidRequest.
        """
        proof = self._proof
        shorter = None
        if is_known and proof is not None and place > 1:
            shorter = await self._shorter(conversation, place, proof)
        if shorter is None:
            return await self._behind(conversation, place)
        try:
            behind = await self._behind(*shorter)
        except InvalidRequest:  # the template may refuse a conversation that begins like this
            behind = None
        self._shortened += 1
        if behind is not None and self._shortened % _COMPARED_EVERY:
            return behind
        whole = await self._behind(conversation, place)
        if behind is not None and behind != whole:
            self._proof = None
            logger.error(
                "from now on, whole conversations are rendered: the template depends on earlier messages"
            )
        return whole

    async def _shorter(
        self, conversation: Conversation, place: int, proof: Proof
    ) -> tuple[Conversation, int] | None:
        if proof.search is not None and len(conversation.messages) > _MANY_MESSAGES:
            return await self._threads.run(lambda: shortened(conversation, place, proof), conversation.client)
        return shortened(conversation, place, proof)

    async def _behind(self, conversation: Conversation, place: int) -> str | None:
        if conversation.size > _LONG_BODY:
            return await self._threads.run(
                lambda: self._text_behind(conversation, place), conversation.client
            )
        return self._text_behind(conversation, place)

    def _text_behind(self, conversation: Conversation, place: int) -> str | None:
        messages = [for_template(message) for message in conversation.messages]
        for marked in _marked(messages[place]):
            messages[place] = marked
            before, mark, behind = self._render(conversation, messages).rpartition(_MARK)
            if mark and _MARK not in before:
                return behind
        return None

    def _proved(self, source: object) -> Proof | None:
        """Return the proof that ``source`` is local, if no trial contradicts it."""
        proof = prove(source) if isinstance(source, str) else None
        if proof is None or not all(
            self._agrees(proof, Conversation(messages, tools, generation_prompt=generation_prompt), place)
            for messages, place in trials()
            for tools, generation_prompt in ((None, True), ([_TOOL], False))
        ):
            return None
        return proof

    def _agrees(self, proof: Proof, trial: Conversation, place: int) -> bool:
        """Return True if the text behind ``place`` is the same when earlier messages are left out."""
        shorter = shortened(trial, place, proof)
        if shorter is None:
            return True  # a conversation that cannot be shortened is rendered as a whole
        try:
            return self._text_behind(*shorter) == self._text_behind(trial, place)
        except InvalidRequest:
            return True  # a conversation that is refused when shortened is rendered as a whole, too

    def end_of_turn(self, conversation: Conversation) -> str | None:
        """Return the text behind the content of an assistant's message that ends a conversation and has no calls.

        The template is tried on other messages, with the variables of ``conversation``, and with a tool if
        ``conversation`` has tools. Return None if the text depends on earlier messages or is not found, if the cache is
        full, or if the variables are too long.
        """
        tools = None if conversation.tools is None else [_TOOL]
        key = f"{tools is None} {conversation.variables or ''}"
        if key not in self._ends and len(self._ends) < _MOST_ENDS and len(key) < _LONGEST_KEY:
            self._ends[key] = self._same_end(replace(conversation, tools=tools))
        return self._ends.get(key)

    def _same_end(self, conversation: Conversation) -> str | None:
        ends = set()
        for before, thoughts in product(_BEFORE, ({}, {"reasoning_content": "!"})):
            spoken = {"role": "assistant", "content": _MARK, **thoughts}
            trial = replace(conversation, messages=before)
            try:
                text = self._render(trial.until(len(before), spoken))
            except InvalidRequest:
                continue
            shown, mark, behind = text.rpartition(_MARK)
            ends.add(behind if mark and _MARK not in shown else None)
        return ends.pop() if len(ends) == 1 else None

    def _form_of_calls(self) -> _Form:
        """Find the form that the template reads.

        Most templates want arguments as an object, but some want JSON text. Some templates look for calls only if the
        content is None.
        """
        function = {"name": "probed", "arguments": {"a": "b"}}
        call = {"type": "function", "id": "call00000", "function": function}
        calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        for form in _FORMS:
            self._form = form
            asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}, calling]
            try:
                text = self._render(Conversation(asked, generation_prompt=False))
            except InvalidRequest:
                continue
            if "probed" in text and "{'a': 'b'}" not in text:
                return form
        return _FORMS[0]

    def _probed(self, messages: Sequence[Mapping[str, Any]], with_tools: bool) -> str | None:
        try:
            return self._render(Conversation(messages, [_TOOL] if with_tools else None))
        except InvalidRequest:
            return None

    def _render(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of ``messages``, by default those of ``conversation``."""
        messages = [*(messages or map(for_template, conversation.messages))]
        if conversation.continues:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{_MARK}"}
        try:
            if self._form is not _FORMS[0]:
                messages = [self._form.of(message) for message in messages]
            text = self._template.render(
                messages,
                conversation.tools,
                conversation.variables,
                add_generation_prompt=conversation.generation_prompt and not conversation.continues,
            )
        except Exception as error:  # a template is a program, which may raise anything
            why = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"The chat template refuses these messages: {why}") from None
        assert isinstance(text, str), "tokenize=False gives text"
        text = as_written(text)
        if not conversation.continues:
            return text
        before, mark, _ = text.rpartition(_MARK)
        if not mark:
            raise InvalidRequest(
                "continue_final_message", "The chat template does not show the last message as it is."
            )
        return before


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _marked(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a copy of ``message`` with the mark as its content.

    If ``message`` has calls, also return a copy with the mark in the arguments of the last call.
    """
    spoken = {**message, "content": _MARK}
    calls = message.get("tool_calls")
    if not calls:
        return [spoken]
    *others, last = calls
    function = {**last["function"], "arguments": {_MARK: 1}}
    return [spoken, {**message, "tool_calls": [*others, {**last, "function": function}]}]


def _text_of(template: Any) -> str:
    """Return the text of a tokenizer's template. Of several named templates, prefer the one for tools."""
    if isinstance(template, Mapping):
        return str(template.get("tool_use") or template.get("default") or "")
    return str(template)
