"""Long conversations through ``/v1/chat/completions``, turn by turn: the tokens that the router tokenises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import httpx
import orjson

from benchmarks.options import Options
from benchmarks.report import Column, Report
from benchmarks.samples import Samples
from benchmarks.streams import quantile_us

__all__ = ["measure_turns", "show_turns"]

_CONVERSATIONS = 16
_TURNS = 20
_SHOWN = (1, 2, 5, 10, 15, 20)
_SYSTEM_TOKENS, _ASKED_TOKENS = 1000, 440
_SCENARIO = f"{_TURNS} turns"
_JSON = {"content-type": "application/json"}

_Message = dict[str, str]
#: Returns the messages that a client sends, from the messages of the conversation and the number of the turn.
_Sent = Callable[[list[_Message], int], list[_Message]]


def _as_they_are(messages: list[_Message], turn: int) -> list[_Message]:
    """Return the messages as they are: the conversation goes on."""
    return messages


def _other_system(messages: list[_Message], turn: int) -> list[_Message]:
    """Change the system prompt in each turn. So the router knows no earlier turn, only texts of other messages."""
    return [_marked(messages[0], turn), *messages[1:]]


def _all_other(messages: list[_Message], turn: int) -> list[_Message]:
    """Change every message in each turn. So the router knows no text of an earlier turn."""
    return [_marked(message, turn) for message in messages]


def _marked(message: _Message, turn: int) -> _Message:
    return {**message, "content": f"Turn {turn}. {message['content']}"}


_EXACT = "exact"
_WAYS: dict[str, _Sent] = {_EXACT: _as_they_are, "system": _other_system, "all": _all_other}
_COLUMNS = (
    Column("prompt", "prompt tokens"),
    Column("exact", "exact %"),
    Column("exact_encoded", "tokenised"),
    Column("exact_ms", "ms", 1),
    Column("system_encoded", "system changed: tokenised"),
    Column("system_ms", "ms", 1),
    Column("all_encoded", "all changed: tokenised"),
    Column("all_ms", "ms", 1),
)


@dataclass(slots=True)
class _Talk:
    """A conversation. ``known``: the ids of its turns so far, from the replies."""

    session: str
    messages: list[_Message]
    known: list[int] = field(default_factory=list)

    def hear(self, reply: dict[str, Any]) -> bool:
        """Add an answer. Returns True if its prompt began with the ids of all earlier turns.

        From the second turn on, the router must also say that the history is exact.
        """
        prompt, [choice] = reply["prompt_token_ids"], reply["choices"]
        goes_on = reply["history"] == "exact" if self.known else True
        goes_on = goes_on and prompt[: len(self.known)] == self.known
        self.known = prompt + choice["token_ids"]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        return goes_on


async def measure_turns(
    options: Options, report: Report, url: str, samples: Samples, max_tokens: int
) -> None:
    """Hold the conversations, one request at a time. Each turn is sent in all three of ``_WAYS``, in rotating order."""
    system = {"role": "system", "content": samples.words(_SYSTEM_TOKENS)}
    talks = [_Talk(f"talk{number}", [system]) for number in range(options.pick(_CONVERSATIONS, tiny=2))]
    ways = list(_WAYS)
    async with httpx.AsyncClient(base_url=url, headers=_JSON, trust_env=False, timeout=60) as client:
        for turn in range(1, options.pick(_TURNS, tiny=2) + 1):
            for talk in talks:
                talk.messages.append({"role": "user", "content": samples.words(_ASKED_TOKENS)})
            figures: dict[str, float] = {}
            replies: dict[str, list[dict[str, Any]]] = {}
            for way in ways:
                before = await _tokens_encoded(client)
                answers = [await _ask(client, way, talk, turn, max_tokens) for talk in talks]
                replies[way] = [reply for reply, _ in answers]
                figures[f"{way}_encoded"] = (await _tokens_encoded(client) - before) / len(talks)
                figures[f"{way}_ms"] = quantile_us([took_ns for _, took_ns in answers], 0.5) / 1e3
            exact = [talk.hear(reply) for talk, reply in zip(talks, replies[_EXACT], strict=True)]
            figures["exact"] = sum(exact) / len(talks) * 100
            figures["prompt"] = sum(len(reply["prompt_token_ids"]) for reply in replies[_EXACT]) / len(talks)
            if turn in _SHOWN:
                report.add(_SCENARIO, f"turn {turn}", **figures)
            ways.append(ways.pop(0))


def show_turns(report: Report) -> None:
    report.show(_SCENARIO, _COLUMNS)


async def _ask(
    client: httpx.AsyncClient, way: str, talk: _Talk, turn: int, max_tokens: int
) -> tuple[dict[str, Any], int]:
    """Return the answer, and the nanoseconds that it took."""
    body = {
        "messages": _WAYS[way](talk.messages, turn),
        "max_tokens": max_tokens,
        "session_id": f"{way} {talk.session}",
        "return_token_ids": True,
    }
    content = orjson.dumps(body)
    began = monotonic_ns()
    reply = await client.post("/v1/chat/completions", content=content)
    took_ns = monotonic_ns() - began
    answer: dict[str, Any] = orjson.loads(reply.raise_for_status().content)
    return answer, took_ns


async def _tokens_encoded(client: httpx.AsyncClient) -> int:
    stats = (await client.get("/cache_stats")).raise_for_status().json()
    count: int = stats["tokenizer"]["tokens_encoded"]
    return count
