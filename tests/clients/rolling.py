"""A conversation with tools, and how its tokens are judged by what the engine knows of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import eq
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal

from deadlines import HANG_S
from openai_.chat_models.families import Call, Family, Words
from openai_.chat_models.steered import Steered
from slime_engine.journal import JournalEntry
from slime_testing import Running

__all__ = [
    "ANSWERS",
    "FORCED_CALLS",
    "LAST_WORDS",
    "QUESTION",
    "RESULTS",
    "SYSTEM",
    "TOOLS",
    "Rolling",
    "Rollout",
    "call",
    "clock",
    "weather",
]

SYSTEM = "Ask before you answer."
QUESTION = "Where shall I go, Zürich or São Paulo?"
LAST_WORDS = "Stay at home: it rains “everywhere” ☔"
#: The model's answers, turn by turn. It spells its arguments as no client would.
ANSWERS = (
    Words(
        "",
        "Two places, two calls.",
        (
            Call("weather", '{"days":2,  "city": "Z\\u00fcrich"}'),
            Call("weather", '{ "city" : "São Paulo" , "days" : 3 }'),
        ),
    ),
    Words("It is late, I think.", "\nAnd there?\n", (Call("clock", '{"city":"東京"}'),)),
    Words(LAST_WORDS, "Clear."),
)
#: The same calls by a model that is bound to call: a list in JSON, whatever its own format is.
FORCED_CALLS = (
    Words(
        '[{"name":"weather", "parameters":{"days":2,"city":"Z\\u00fcrich"}}, '
        '{"name" : "weather","parameters": { "city":"São Paulo","days":3}}]'
    ),
    Words('[ {"name":"clock","parameters":{"city":"東京"}}]'),
)


def weather(city: str, days: int) -> str:
    """The weather of the next days.

    Args:
        city: Name of the city.
        days: How many days.
    """
    return f"{days} days of rain in {city}"


def clock(city: str) -> str:
    """The time of day.

    Args:
        city: Name of the city.
    """
    return f"23:59 in {city} ☾"


#: The tools' results of the calls in ANSWERS.
RESULTS = (weather("Zürich", 2), weather("São Paulo", 3), clock("東京"))


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


#: The tools for clients that make no schemas of functions.
TOOLS: list[Any] = [
    _tool("weather", "The weather of the next days.", city="string", days="integer"),
    _tool("clock", "The time of day.", city="string"),
]


def call(name: str, arguments: str) -> str:
    """The result of a tool."""
    tools: dict[str, Callable[..., str]] = {"weather": weather, "clock": clock}
    return tools[name](**json.loads(arguments))


@dataclass(frozen=True)
class Rollout:
    """A router in a thread of its own, and the engine behind it. Clients get ``base_url`` and ``headers``, no more.

    ``results``: what tools say; the model has to have read it.
    """

    portal: BlockingPortal
    running: Running
    engine: Steered
    family: Family
    results: tuple[str, ...]
    session: str = "rollout-1"

    @property
    def base_url(self) -> str:
        return f"{self.running.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-Id": self.session}

    @property
    def payloads(self) -> list[dict[str, Any]]:
        """The bodies sent to ``/generate``, in order."""
        payloads: list[dict[str, Any]] = self.running.router.components.get("payloads")
        return payloads

    def replace_engine(self, url: str | None) -> None:
        """From now on the worker at ``url`` answers, or none does."""
        router = self.running.router
        for worker in list(router.pool):
            self.portal.call(router.pool.remove, worker)
        if url is not None:
            self.portal.call(router.add_worker, url)

    def judge(self, *others: str, turns: int, samples: int = 1) -> list[dict[str, Any]]:
        """The records of the session, and of ``others``.

        The engine had so many ``turns``, and all of them are in so many ``samples``: one for a conversation, whatever
        a client did to its history. Raises AssertionError.
        """
        entries = self.engine.journal()
        records = self.records(*others)
        assert (len(entries), len(records)) == (turns, samples)
        for entry in entries:
            whole = [*entry.input_ids, *entry.output_ids]
            assert any(record["tokens"][: len(whole)] == whole for record in records)
        for result in self.results:
            assert any(result in record["text"] for record in records)
        return records

    def records(self, *others: str) -> list[dict[str, Any]]:
        """All records; each is, bit for bit, what the engine consumed and sampled. Raises AssertionError."""
        sessions = [self._get(f"/trajectories/{session}") for session in (self.session, *others)]
        assert all(session["complete"] for session in sessions)
        records: list[dict[str, Any]] = [record for each in sessions for record in each["trajectories"]]
        for record in records:
            _check(record, self.engine.journal())
            assert record["tokens"] != self.family.tokenizer.encode(record["text"]), "this proves nothing"
            (end,) = self.family.tokenizer.encode(self.family.eos)
            assert (end, end) not in pairwise(record["tokens"])  # the model's, or else the template's
        stats = self._get("/cache_stats")
        assert (stats["untouched"], stats["unrecorded"], stats["aborts"]) == ({}, {}, {})
        return records

    def _get(self, path: str) -> Any:
        return (
            httpx.get(f"{self.running.url}{path}", trust_env=False, timeout=HANG_S).raise_for_status().json()
        )


def _check(record: dict[str, Any], entries: list[JournalEntry]) -> None:
    """Sampled is what an engine sampled behind the very tokens before it, and it ends with all of an answer."""
    tokens = record["tokens"]
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    versions: list[str | int] = [-1] * len(tokens)
    ended = None
    for entry in entries:
        start = len(entry.input_ids)
        if tokens[:start] != list(entry.input_ids):
            continue
        kept = len(list(takewhile(bool, map(eq, tokens[start:], entry.output_ids))))
        mask[start : start + kept] = [1] * kept
        logprobs[start : start + kept] = entry.output_logprobs[:kept]
        versions[start : start + kept] = ["default"] * kept
        if start + len(entry.output_ids) == len(tokens):
            ended = entry.finish_reason
    assert record["exact"], record["inexact_reason"]
    assert record["loss_mask"] == mask
    assert record["rollout_logp"] == logprobs
    assert record["generation_versions"] == versions
    assert ended is not None
    assert record["finish_reason"] == ended


#: ``rolling(*answers, family=..., results=..., others=...)``: a router before a model that says this, turn by turn;
#: ``others`` are what it says in conversations in which that text stands.
Rolling = Callable[..., Rollout]
