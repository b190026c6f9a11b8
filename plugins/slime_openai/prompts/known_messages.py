"""Messages of recent requests, as they were read, with their keys. The next request of a chat repeats its messages.

If a request begins with known messages of its chat, these messages are not validated again. If the request also has the
same tools and template variables, the keys of these messages are not computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from slime_openai.prompts.identity import Key
from slime_openai.prompts.question import Question
from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.chat_request import ChatRequest, read_chat
from slime_openai.requests.messages import Message, PartlyRead, exact_messages, has_objects

__all__ = ["Beginning", "KnownMessages", "read_question"]

#: Limits with which the messages of one chat are compared within a millisecond. ``_LARGEST_CHAT``: bytes of memory of
#: the kept messages. ``_MOST_MEMBERS``: members of a message. ``_MOST_PARTS``: items in a list of parts or calls.
#: ``_MOST_VALUES``: names and values in such an item. The first message beyond a limit, and the messages behind it, are
#: not kept.
_LARGEST_CHAT, _MOST_MEMBERS, _MOST_PARTS, _MOST_VALUES = 1 << 22, 16, 32, 32
#: A chat is named by its first answer, which is looked for among this many messages at the beginning.
_NEAR = 8
#: Bytes of memory of a kept message, and of a part or a call in it, without their text.
_MESSAGE_BYTES, _PART_BYTES = 768, 1_280
#: Members whose lists have parts or calls.
_PARTS = frozenset(("content", "tool_calls"))
#: Bytes of a character that is not ASCII, at most: in its string, and in a UTF-8 copy that CPython may keep with it.
_WIDE = 8


class Beginning(NamedTuple):
    """Known messages that a request begins with. ``items``: their JSON; ``messages``: the messages read from it.

    ``keys``: the key before the first message, and the key behind each message. ``sizes``: for each message, the bytes
    of memory of all messages up to it. ``others``: the JSON of the other messages. ``name``: the name of the chat;
    None: its messages are not kept.
    """

    name: Hashable = None
    others: Any = None
    items: Sequence[Any] = ()
    messages: tuple[Message, ...] = ()
    keys: Sequence[Key] = ()
    sizes: Sequence[int] = ()


class KnownMessages:
    """Messages of recent chats; the chats that were kept longest ago are evicted. ``size_bytes``: memory, roughly.

    Messages are equal if Python takes their JSON for equal. To Python, 1, 1.0 and true are equal. The difference
    between these values matters only in call arguments that are an object, not text. So the caller does not keep the
    messages of a request in which a new message has such arguments.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._chats: OrderedDict[Hashable, Beginning] = OrderedDict()

    def beginning(self, body: Any, session: str | None) -> Beginning:
        """Return the known beginning of the messages in ``body``. O(their text). ``body`` may be any JSON."""
        if not isinstance(body, dict):
            return Beginning()
        items: Any = body.get("messages")
        named = session or body.get("session_id")
        name = _name_of(items, named if isinstance(named, str) else None)
        known = self._chats.get(name) if name is not None else None
        if known is None:
            return Beginning(name, items)
        count = 0
        for item, other in zip(known.items, items, strict=False):
            if item != other:
                break
            count += 1
        return Beginning(
            known.name,
            items[count:],
            known.items[:count],
            known.messages[:count],
            known.keys[: count + 1],
            known.sizes[:count],
        )

    def keep(self, known: Beginning, question: Question) -> None:
        """Keep the messages of ``question``, and their keys. ``known``: the known beginning of its request."""
        if known.name is None:
            return
        sizes = [*known.sizes]
        total = sizes[-1] if sizes else 0
        for item in known.others:
            size = _size_of(item)
            if size is None or total + size > _LARGEST_CHAT:
                break
            total += size
            sizes.append(total)
        count = len(sizes)
        self._forget(known.name)
        if count:
            items = [*known.items, *known.others[: count - len(known.items)]]
            self._chats[known.name] = Beginning(
                known.name, None, items, question.messages[:count], question.keys[: count + 1], sizes
            )
            self.size_bytes += total
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._chats)))

    def _forget(self, name: Hashable) -> None:
        known = self._chats.pop(name, None)
        if known is not None:
            self.size_bytes -= known.sizes[-1]


def read_question(
    body: Any, raw: bytes, known: Beginning, session: str | None, traits: TemplateTraits
) -> tuple[ChatRequest, Question, bool]:
    """Return the request in ``body``, its question, and True if the question may be kept. Raises InvalidRequest.

    ``raw``: the bytes of ``body``; ``known``: its known beginning; ``session``: the session, or None if only the body
    may name one.
    """
    if has_objects(known.others):
        request = read_chat({**body, "messages": exact_messages(raw)})
        return request, Question.of(request, session or request.session, traits), False
    if known.messages:
        body = {**body, "messages": PartlyRead(known.messages, known.others)}
    request = read_chat(body)
    return request, Question.of(request, session or request.session, traits, known.keys), True


def _name_of(items: Any, session: str | None) -> Hashable:
    """Return a name that other chats are unlikely to have: the session, and the first answer.

    Return None if no text or id of an answer is found among the first messages. ``items`` may be any JSON.
    """
    if not isinstance(items, list):
        return None
    for item in items[:_NEAR]:
        if isinstance(item, dict) and item.get("role") == "assistant":
            said = item.get("content") or item.get("tool_calls")
            if isinstance(said, list) and said and isinstance(said[0], dict):
                said = said[0].get("text") or said[0].get("id")
            return (session, said) if isinstance(said, str) else None
    return None


def _size_of(item: Mapping[str, Any]) -> int | None:
    """Return the bytes of memory that ``item`` and the message read from it take, at most. None: it is not kept.

    Only usual messages are kept. In these, each member is text, null, or a list of parts or calls.
    """
    if len(item) == 2 and type(text := item.get("content")) is str and text.isascii():
        return _MESSAGE_BYTES + len(text)  # most messages have only a role and a text
    if len(item) > _MOST_MEMBERS:
        return None
    size = _MESSAGE_BYTES
    for name, value in item.items():
        if type(value) is str:
            size += len(value) if value.isascii() else _WIDE * len(value)
        elif value is None:
            size += _WIDE * len(name)  # a member that is null may have any name, of any length
        elif name not in _PARTS or len(value) > _MOST_PARTS:
            return None
        else:
            for part in value:
                inner = _text_bytes(part)
                if inner is None:
                    return None
                size += _PART_BYTES + inner
    return size


def _text_bytes(part: Mapping[str, Any]) -> int | None:
    """Return twice the bytes of the text in a part or a call: parts are joined to a copy. None: see _size_of."""
    size = 0
    values: list[Any] = [part]
    for value in values:
        if type(value) is str:
            size += len(value) if value.isascii() else _WIDE * len(value)
        elif type(value) is dict:
            values += value
            values += value.values()
            if len(values) > _MOST_VALUES:
                return None
        elif value is not None and type(value) is not int:
            return None
    return 2 * size
