"""SIGKILL to the router, again and again, while clients chat: each conversation stays one exact sample.

The engine is in this process, outlives the router, and spells every word as no tokenizer would; so whatever is
tokenised anew is found out. Its journal is what the answers and the samples are held against.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import anyio
import httpx
import orjson
import pytest

from chaos.processes import Program, free_port
from chat_models.families import QWEN3, Call, Words
from chat_models.steered import by_text, speaking
from drift.clients import CLIENTS, Habit
from drift.rollouts import TOOLS
from slime_engine.journal import JournalEntry
from state.test_kill import listening, started

KILLS = 5
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
class Heard:
    """One answer that a client has all of. ``life``: of the router that gave it."""

    rid: str
    history: str
    prompt: list[int]
    sampled: list[int]
    life: int


@dataclass
class Chat:
    """A conversation, and what was heard in it. Without a session it is found again by its words."""

    name: str
    session: str | None
    habit: Habit
    streamed: bool
    tools: bool
    messages: list[Message]
    heard: list[Heard] = field(default_factory=list)

    def fork(self) -> Chat:
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

    def hear(self, heard: Heard, message: Message) -> None:
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
        self.chats: list[Chat] = []
        self.steady = anyio.Event()  # set while what they have heard is not looked at

    async def converse(self, number: int, habit: Habit) -> None:
        for conversation in count():
            name = f"client{number}-{conversation}"
            chat = Chat(
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

    async def _turn(self, chat: Chat) -> None:
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
            chat.hear(Heard(rid, document["history"], prompt, sampled, life), message)
            return

    async def _asked(self, chat: Chat, rid: str) -> tuple[dict[str, Any], Message] | None:
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
                if choice["finish_reason"] is not None:
                    choice["token_ids"] = sampled
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


def check_answers(chats: Sequence[Chat], journal: dict[str, JournalEntry]) -> None:
    """Each turn consisted of all tokens of the turn before, and something behind them."""
    for chat in chats:
        known: list[int] = []
        for number, heard in enumerate(chat.heard):
            entry = journal[heard.rid]
            assert (heard.prompt, heard.sampled) == (list(entry.input_ids), list(entry.output_ids))
            assert heard.history in (("exact", "restored") if number else ("fresh",)), (chat.name, number)
            assert heard.prompt[: len(known)] == known, (chat.name, number)
            known = heard.prompt + heard.sampled


async def check_samples(
    client: httpx.AsyncClient, chats: Sequence[Chat], journal: dict[str, JournalEntry]
) -> None:
    """Of each session, every conversation is one exact sample; what else it has is what nobody heard the end of."""
    sessions: dict[str, list[Chat]] = {}
    for chat in chats:
        if chat.session is not None and chat.heard:
            sessions.setdefault(chat.session, []).append(chat)
    for session, branches in sessions.items():
        document = (await client.get(f"/trajectories/{session}")).json()
        leaves = {tuple(leaf["tokens"]): leaf for leaf in document["trajectories"]}
        assert len(leaves) == len(document["trajectories"])
        last = {branch.heard[-1].rid: branch for branch in branches}
        for rid, branch in last.items():
            if any(heard.rid == rid for other in branches for heard in other.heard[:-1]):
                continue  # the other branch has gone on from it
            check_sample(leaves.pop((*branch.heard[-1].prompt, *branch.heard[-1].sampled)), branch, journal)
        unheard = {
            (*entry.input_ids, *entry.output_ids) for entry in journal.values() if entry.rid not in last
        }
        everything = {heard.rid for branch in branches for heard in branch.heard}
        heard_tokens = {(*journal[rid].input_ids, *journal[rid].output_ids) for rid in everything}
        assert leaves.keys() <= unheard - heard_tokens, session


def check_sample(leaf: dict[str, Any], chat: Chat, journal: dict[str, JournalEntry]) -> None:
    """All that was sampled in the conversation is to be trained on, and nothing else."""
    assert leaf["exact"], leaf["inexact_reason"]
    mask = [0] * len(leaf["tokens"])
    logprobs = [0.0] * len(leaf["tokens"])
    for heard in chat.heard:
        place = slice(len(heard.prompt), len(heard.prompt) + len(heard.sampled))
        mask[place] = [1] * len(heard.sampled)
        logprobs[place] = journal[heard.rid].output_logprobs
    assert (leaf["loss_mask"], leaf["rollout_logp"]) == (mask, logprobs), chat.name


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_conversation_stays_one_exact_sample_over_kills(tmp_path: Path) -> None:
    port = free_port()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        speaking(QWEN3, by_text(QWEN3.tokenizer, reply), tokens_per_second=150) as engine,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False, limits=limits
        ) as client,
        anyio.create_task_group() as tasks,
    ):
        flags = [
            *("--port", str(port), "--log-level", "warn", "--worker-urls", engine.url),
            *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint, "--gc-threshold-k", "0"),
            *("--trajectory-log", str(tmp_path / "log"), "--plugin", "openai"),
        ]
        clients = Clients(client)
        for life in range(KILLS + 1):
            clients.life = life
            with started(Program(flags, tmp_path / "router.log")) as router:
                await listening(client, router)
                if not life:
                    for number, habit in enumerate(CLIENTS.values()):
                        tasks.start_soon(clients.converse, number, habit)
                journal = {entry.rid: entry for entry in engine.journal()}
                check_answers(clients.chats, journal)
                await check_samples(client, clients.chats, journal)
                if life < KILLS:
                    clients.steady.set()
                    await anyio.sleep(random.uniform(0.4, 1.5))
                    clients.steady = anyio.Event()
                router.kill()  # SIGKILL
        tasks.cancel_scope.cancel()
    # What there was to be lost.
    gone_on = [chat for chat in clients.chats if len({heard.life for heard in chat.heard}) > 1]
    assert len(gone_on) > len(CLIENTS)
    assert {chat.streamed for chat in gone_on} == {chat.tools for chat in gone_on} == {True, False}
    assert any(chat.session is None for chat in gone_on)
    assert any(chat.name.endswith("fork") and len(chat.heard) > FORK_AFTER for chat in gone_on)
    assert any("tool_calls" in message for chat in gone_on for message in chat.messages)
