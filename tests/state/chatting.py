"""Clients that chat with a router that is killed meanwhile, and ask again until they are answered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

import anyio
import httpx
import orjson

from openai_.chat_models.families import QWEN3, Call, Words
from openai_.drift.clients import Habit
from openai_.drift.rollouts import TOOLS
from state.hearing import HeardAnswers

__all__ = ["FORK_AFTER", "TURNS", "Clients", "HeardAnswer", "StatedChat", "reply"]

TURNS = 6
FORK_AFTER = 2

Message = dict[str, Any]

SAID = (
    Words("Two words, café.\n", thoughts="short"),
    Words("  indented 日本語 😀", thoughts="  they want\nmore  "),
    Words("", "ask first", (Call("weather", '{"days":2,  "place": "Z\\u00fcrich"}'),)),
    Words("", "both", (Call("weather", '{"place":"Rio"}'), Call("time", '{ "place" : "東京" }'))),
    Words("Done, or nearly so.", thoughts=""),
)


def reply(text: str) -> Sequence[str]:
    """Anything, but the same behind the same text; no calls where there are no tools."""
    turn = text.count("<|im_start|>assistant")
    words = SAID[(crc32(text[:300].encode()) + turn) % len(SAID)]
    if "<tools>" not in text:
        words = Words(words.content or "No tools.", words.thoughts)
    return [QWEN3.says(words, text)]


@dataclass
class HeardAnswer:
    """One answer that a client has all of. ``life``: of the router that gave it."""

    rid: str
    history: str
    prompt: list[int]
    sampled: list[int]
    life: int


@dataclass
class StatedChat:
    """A conversation, and what was heard in it. Without a session it is found again by its words."""

    name: str
    session: str | None
    habit: Habit
    streamed: bool
    tools: bool
    messages: list[Message]
    heard: list[HeardAnswer] = field(default_factory=list)
    #: Requests of the session of which something was heard, and not the end.
    partly_heard: set[str] = field(default_factory=set)

    def fork(self) -> StatedChat:
        """Another one that goes on from the same answers, in other words."""
        other = copy.copy(self)
        other.name += "-fork"
        other.messages = [*self.messages[:-1], {**self.messages[-1], "content": "Something else, please."}]
        other.heard = list(self.heard)
        return other

    def body(self, rid: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": self.messages,
            "rid": rid,
            "return_token_ids": True,
            "max_tokens": 200,
            "stream": self.streamed,
        }
        return body | ({"tools": TOOLS} if self.tools else {})

    def hear(self, heard: HeardAnswer, message: Message) -> None:
        """An answer, and what is said to it."""
        self.heard.append(heard)
        message = {key: value for key, value in message.items() if key != "refusal"}
        self.habit(message)
        self.messages.append(message)
        calls = message.get("tool_calls") or ()
        for call in calls:
            self.messages.append({"role": "tool", "content": "42", "tool_call_id": call["id"]})
        if not calls:
            self.messages.append({"role": "user", "content": f"And then, {self.name}?"})


class Clients:
    """All of them ask again until they are answered. ``life`` is the number of the router's process."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.life = 0
        self.chats: list[StatedChat] = []
        self.steady = anyio.Event()  # set while what they have heard is not looked at
        self.heard = HeardAnswers()

    async def converse(self, number: int, habit: Habit) -> None:
        for conversation in count():
            name = f"client{number}-{conversation}"
            chat = StatedChat(
                name,
                name if number % 3 else None,
                habit,
                streamed=number % 2 == 1,
                tools=number % 4 < 2,
                messages=[{"role": "user", "content": f"This is {name}, who are you?"}],
            )
            both = [chat]
            self.chats.append(chat)
            for turn in range(TURNS):
                if turn == FORK_AFTER:
                    both.append(chat.fork())
                    self.chats.append(both[1])
                for each in both:
                    await self._turn(each)

    async def _turn(self, chat: StatedChat) -> None:
        for attempt in count():
            await self.steady.wait()
            rid = f"{chat.name}.{len(chat.heard)}.{attempt}"
            life = self.life
            answer = None
            with suppress(httpx.TransportError):
                answer = await self._asked(chat, rid)
            if answer is None:
                await anyio.sleep(0.05)
                continue
            document, message = answer
            [choice] = document["choices"]
            sampled, prompt = choice["token_ids"], document["prompt_token_ids"]
            assert choice["exact"]
            chat.hear(HeardAnswer(rid, document["history"], prompt, sampled, life), message)
            self.heard.add()
            return

    async def _asked(self, chat: StatedChat, rid: str) -> tuple[dict[str, Any], Message] | None:
        """The answer, or the last chunk of it with all tokens; and its message. None when not all of it came."""
        headers = {"x-session-id": chat.session} if chat.session else {}
        path, body = "/v1/chat/completions", chat.body(rid)
        if not chat.streamed:
            answer = await self._client.post(path, json=body, headers=headers)
            if answer.status_code != 200:
                return None
            document = answer.json()
            return document, document["choices"][0]["message"]
        message: Message = {"role": "assistant", "content": ""}
        prompt: list[int] = []
        sampled: list[int] = []
        async with self._client.stream("POST", path, json=body, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                document = orjson.loads(line[6:])
                if "error" in document:
                    return None
                [choice] = document["choices"]
                fold(message, choice["delta"])
                prompt += document.get("prompt_token_ids", ())
                sampled += choice.get("token_ids", ())
                chat.partly_heard.add(rid)
                if choice["finish_reason"] is not None:
                    choice["token_ids"] = sampled
                    chat.partly_heard.remove(rid)
                    return document | {"prompt_token_ids": prompt}, message
        return None


def fold(message: Message, delta: Message) -> None:
    """Put a chunk of a stream into its message."""
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for key, text in piece["function"].items():
            calls[piece["index"]]["function"][key] += text
