"""A conversation of some turns with a model that says what is planned, and everything that is known of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from openai_.chat_models.families import DEEPSEEK, Call, Family, Words
from openai_.drift.clients import Habit

__all__ = ["PLAIN", "TOOLS", "WITH_TOOLS", "DriftRollout", "Plan"]

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time")
]

#: The model's answers in turn. Its spelling of arguments is nobody's else.
PLAIN = (
    Words("Two words, café.\n", thoughts="short"),
    Words("  indented 日本語 😀", thoughts="  they want\nmore  "),
    Words("Done.", thoughts=""),
)
WITH_TOOLS = (
    Words("", "ask first", (Call("weather", '{"days":2,  "place": "Z\\u00fcrich"}'),)),
    Words("It rains.", "so"),
    Words("", "both", (Call("weather", '{"place":"Rio"}'), Call("time", '{ "place" : "東京" }'))),
    Words("Late, and dry.\n\n", "good"),
)


class Plan:
    """The model's next answers: the script of a steered engine, by the text before it."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._left: deque[Words] = deque()

    def say(self, words: Words) -> None:
        self._left.append(words)

    def __call__(self, text: str) -> Sequence[str]:
        return [self._family.says(self._left.popleft(), text)]


@dataclass
class DriftRollout:
    """One conversation of a client with such a ``habit``. ``replies`` are the choices that it got.

    ``verbatim``: the messages, if it had no habit. ``reads_alike``: for each turn, the template writes both alike.
    """

    client: httpx.AsyncClient
    family: Family
    plan: Plan
    session: str
    habit: Habit
    stream: bool
    tools: bool
    messages: list[Message] = field(default_factory=list)
    verbatim: list[Message] = field(default_factory=list)
    reads_alike: list[bool] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """All turns."""
        self._say({"role": "user", "content": f"This is {self.session}, who are you?"})
        for words in WITH_TOOLS if self.tools else PLAIN:
            if not self.family.parallel_calls:
                words = Words(words.content, words.thoughts, words.calls[:1])
            await self.turn(words)
            self.answer_calls()

    async def turn(self, words: Words) -> None:
        """The model says ``words``."""
        self.plan.say(words)
        body: dict[str, Any] = {
            "messages": self.messages,
            "return_token_ids": True,
            "session_id": self.session,
            "max_tokens": 400,
            "chat_template_kwargs": dict(self.family.variables),
            "stream": self.stream,
        }
        if self.tools:
            body["tools"] = TOOLS
        if self.stream:
            document = await self._streamed(body)
        else:
            answer = await self.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            document = answer.json()
        (choice,) = document["choices"]
        assert choice["exact"]
        self.reads_alike.append(self._rendered(self.messages) == self._rendered(self.verbatim))
        self.prompts.append(document["prompt_token_ids"])
        self.origins.append(document["history"])
        self.replies.append(choice)
        self._check(words, choice)
        message = {key: value for key, value in choice["message"].items() if key != "refusal"}
        self.verbatim.append(copy.deepcopy(message))
        self.habit(message)
        self.messages.append(message)

    async def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The stream, put together as SDKs do."""
        message: Message = {"role": "", "content": None}
        calls: list[dict[str, Any]] = []
        document: dict[str, Any] = {}
        prompt: list[int] = []
        sampled: list[int] = []
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line and line != "data: [DONE]":
                    document = orjson.loads(line.removeprefix("data: "))
                    (choice,) = document["choices"]
                    _fold(message, calls, choice["delta"])
                    prompt += document.get("prompt_token_ids", ())
                    sampled += choice.get("token_ids", ())
        if calls:
            message["tool_calls"] = calls
        choice |= {"message": message, "token_ids": sampled}
        return document | {"prompt_token_ids": prompt}

    def _check(self, words: Words, choice: dict[str, Any]) -> None:
        """The client got what the model said."""
        message = choice["message"]
        assert message["role"] == "assistant"
        assert (message["content"] or "").strip() == words.content.strip()
        told = [
            (call["function"]["name"], orjson.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        assert told == [(call.name, orjson.loads(call.arguments)) for call in words.calls]
        assert choice["finish_reason"] == ("tool_calls" if words.calls else "stop")

    def answer_calls(self) -> None:
        """Append the next messages of the environment or of the user."""
        calls = self.messages[-1].get("tool_calls") or ()
        for call in calls:
            result = f'{{"place of": "{call["function"]["name"]}"}}'
            self._say({"role": "tool", "content": result, "tool_call_id": call["id"]})
        if not calls:
            self._say({"role": "user", "content": "And then?"})

    def _say(self, message: Message) -> None:
        self.messages.append(message)
        self.verbatim.append(message)

    @property
    def tokens(self) -> list[int]:
        """All that the engine consumed and sampled in the last turn."""
        last: list[int] = self.replies[-1]["token_ids"]
        return self.prompts[-1] + last

    def rendered_anew(self) -> list[int]:
        """The same conversation as its messages would be tokenised."""
        messages = [*self.messages]
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return list(self.family.tokenizer.encode(self._rendered(messages), add_special_tokens=False))

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self.family.tokenizer.apply_chat_template(
            [_for_template(message, as_text=self.family is DEEPSEEK) for message in messages],
            tools=TOOLS if self.tools else None,
            **self.family.variables,
        )


def _fold(message: Message, calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    message["role"] += delta.get("role", "")
    for key in ("content", "reasoning_content"):
        if delta.get(key) is not None:
            message[key] = (message.get(key) or "") + delta[key]
    for piece in delta.get("tool_calls", ()):
        if piece["index"] == len(calls):
            calls.append(
                {"id": piece["id"], "type": piece["type"], "function": {"name": "", "arguments": ""}}
            )
        call = calls[piece["index"]]
        for key, text in piece["function"].items():
            call["function"][key] += text


def _for_template(message: Message, *, as_text: bool) -> Message:
    """As chat templates want it: one text, and arguments as objects, or ``as_text``."""
    content = message["content"] or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    changed = {**message, "content": content}
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": _function(call["function"], as_text=as_text)}
            for call in message["tool_calls"]
        ]
    return changed


def _function(function: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = orjson.loads(arguments)
    if as_text:
        arguments = orjson.dumps(arguments).decode()
    return {**function, "arguments": arguments}
