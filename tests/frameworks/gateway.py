"""rllm's gateway: what it sends for an agent, and what it reads of each answer.

It puts ``logprobs`` and ``return_token_ids`` into what an agent asks, and makes a trace of the answer. A stream's trace
has the prompt of the first chunk, and the token ids and logprobs of all chunks, one behind the other: vLLM's contract.
In its cumulative mode the turns after the first are completions of the exact tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai_.chat.chatting import Chat

__all__ = ["CHAT", "COMPLETIONS", "Gateway", "Message", "assert_told_once", "logprobs_of", "prompt_of"]

Message = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: Fields that the cumulative mode leaves out of an agent's request.
_OF_CHATS = ("messages", "stream", "stream_options", "tools", "tool_choice")


@dataclass
class Trace:
    """Record of one answer, as the gateway keeps it."""

    prompt: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    version: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


def prompt_of(document: dict[str, Any]) -> list[int]:
    """Of a chat it stands beside the choices, of a completion in the first one."""
    ids = document.get("prompt_token_ids")
    if ids is None and document.get("choices"):
        ids = document["choices"][0].get("prompt_token_ids")
    return list(ids or [])


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    """A chat's are objects, a completion's are numbers."""
    told = choice.get("logprobs") or {}
    if told.get("content") is not None:
        return [entry["logprob"] for entry in told["content"]]
    return list(told.get("token_logprobs") or [])


def trace_of(document: dict[str, Any]) -> Trace:
    choice = document["choices"][0]
    version = document.get("weight_version")
    return Trace(
        prompt_of(document),
        list(choice.get("token_ids") or []),
        logprobs_of(choice),
        choice["message"]["content"] or "" if "message" in choice else choice["text"],
        choice["finish_reason"],
        int(version) if version is not None else None,
    )


def trace_of_stream(chunks: Sequence[dict[str, Any]]) -> Trace:
    trace = Trace(prompt_of(chunks[0]))
    for chunk in chunks:
        for choice in chunk["choices"][:1]:
            trace.sampled += choice.get("token_ids") or []
            trace.logprobs += logprobs_of(choice)
            trace.text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            trace.reason = choice["finish_reason"] or trace.reason
    return trace


@dataclass
class Gateway:
    """One session of the gateway. ``cumulative``: turns after the first are sent as the tokens so far."""

    chat: Chat
    streamed: bool
    cumulative: bool = False
    traces: list[Trace] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, messages: list[Message], new: str = "", **more: Any) -> Trace:
        """An agent's turn; ``new``: how the renderer writes what follows the tokens so far."""
        body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 300, **more}
        body |= {"logprobs": True, "return_token_ids": True}
        path = CHAT
        if self.cumulative and self.traces:
            path, body = COMPLETIONS, {key: value for key, value in body.items() if key not in _OF_CHATS}
            body["prompt"] = self.traces[-1].tokens + self.chat.family.tokenizer.encode(new)
            body["add_special_tokens"] = False
        if self.streamed:
            self.chunks = await self.chat.streamed(path, **body)
            self.traces.append(trace_of_stream(self.chunks))
        else:
            self.traces.append(trace_of(await self.chat.post(path, **body)))
        return self.traces[-1]


def assert_told_once(chunks: Sequence[dict[str, Any]]) -> None:
    """The prompt is in the first chunk only; each chunk has the logprobs of its own tokens; nothing is doubled."""
    assert [bool(prompt_of(chunk)) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert len(choice.get("token_ids") or []) == len(logprobs_of(choice))
