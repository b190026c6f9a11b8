"""Conversion of messages to text with the model's own chat template."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from router_core.errors import BadRequest
from router_core.types import Tokenizer
from slime_fairness.turns import FairThreads
from slime_radix_cache.retrieval.question import Conversation

__all__ = ["ChatTemplate"]

#: Conversations whose body has more bytes than this are rendered in a thread, which does not block the event loop.
_LONG_BODY = 4096
#: ``chat_template_kwargs`` may not set these: they have fields of their own, or are no template variables. For example,
#: a ``chat_template`` from a client would be untrusted code.
_NOT_VARIABLES = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
#: Marks the end of a message. It is random, so no client can write it.
_MARK = f"mark{secrets.token_hex(12)}"


class ChatTemplate:
    """The chat template of a tokenizer, if it has one. Threads may share it: rendering changes no state."""

    def __init__(self, tokenizer: Tokenizer, threads: FairThreads) -> None:
        self._threads = threads
        self._render: Any = getattr(tokenizer, "apply_chat_template", None)
        if getattr(tokenizer, "chat_template", self._render) is None:
            self._render = None

    async def text_of(self, conversation: Conversation, body_bytes: int, client: str | None) -> str:
        """Return the text of ``conversation``, whose JSON had ``body_bytes``, for ``client``. Raises BadRequest."""
        if self._render is None:
            raise BadRequest("the tokenizer has no chat template; use /retrieve_from_text")
        refused = sorted(_NOT_VARIABLES & conversation.variables.keys())
        if refused:
            raise BadRequest(f'"chat_template_kwargs" must not have {", ".join(refused)}')
        if body_bytes > _LONG_BODY:
            return await self._threads.run(lambda: self._text_of(conversation), client)
        return self._text_of(conversation)

    async def closing_space(self, conversation: Conversation, body_bytes: int, client: str | None) -> str:
        """Return the white space that the template writes after the last message. Raises BadRequest.

        The result is empty if the rendered text does not show where the message ends.
        """
        *others, last = conversation.messages
        marked = replace(
            conversation, messages=[*others, {**last, "content": _with_mark(last.get("content"))}]
        )
        _, mark, behind = (await self.text_of(marked, body_bytes, client)).rpartition(_MARK)
        return behind[len(behind.rstrip()) :] if mark else ""

    def _text_of(self, conversation: Conversation) -> str:
        try:
            text = self._render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                tokenize=False,
                **conversation.variables,
            )
        except Exception as error:  # a template is a program: it may raise any exception
            raise BadRequest(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}"
            ) from None
        assert isinstance(text, str), "tokenize=False gives text"
        return text


def _with_mark(content: Any) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": _MARK}]
    return f"{content or ''}{_MARK}"
