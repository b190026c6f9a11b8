"""Many sessions that talk at once, in words that are alike: every token is held against the engine, and whose it is.

The truth is per session and complete: what a session sampled is its own, what it went on from is its own from then
on, and everything else that it says is its client's text, whoever sampled the like.
``SLIME_ROUTER_CONVERSATIONS`` says how many requests there are to be.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from openai_.chat.chatting import Chat, chatting
from openai_.chat_models.families import LLAMA, QWEN2_5, QWEN3, Family
from openai_.drift.rollouts import TOOLS
from slime_engine.journal import JournalEntry

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

_REQUESTS = int(os.environ.get("SLIME_ROUTER_CONVERSATIONS", "600"))
_SESSIONS = ("a", "b", "c", None)
_AT_ONCE = 4

Message = dict[str, Any]

#: Siblings: they differ in white space, or in nothing.
_PROMPTS = ("if x:\n    return 1", "    if x:\n        return 1", "if x:\n    return 1\n", "Why?", "Why? ")
_RESULTS = ("42", "  42\n\n", "42 ")
_WORDS = ("same", "  same", "same\n", "Yes.", "No.", "\tYes.")
_ARGUMENTS = (
    '{"place": 18446744073709551616}',
    '{"place": 18446744073709551617}',
    '{"place":"A","place":"B"}',
    '{"place": "B"}',
    '{"days": 1, "place": "B"}',
    '{"place": "B", "days": 1}',
)


def _says(family: Family) -> tuple[str, ...]:
    """Return the answers that the model draws from."""
    if family is LLAMA:
        return _WORDS
    calls = tuple(
        f'<tool_call>\n{{"name": "time", "arguments": {each}}}\n</tool_call>' for each in _ARGUMENTS
    )
    thoughts = ("<think>\nhm\n</think>\n\nsame", "<think>\nah\n</think>\n\nsame") if family is QWEN3 else ()
    return _WORDS + calls + thoughts


@dataclass(eq=False)
class HeardTurn:
    """A request and its answer, the last of ``messages``.

    ``before``: the answers that it may go on from as its own; ``chain``: those that it did go on from, as far as known.
    """

    session: str | None
    messages: list[Message]
    entry: JournalEntry
    before: set[HeardTurn]
    chain: list[HeardTurn] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.entry.input_ids, *self.entry.output_ids]


def _essence(message: Message, family: Family) -> list[Any]:
    """Return the parts of an answer that clients do not change, or of another message all that the template shows."""
    content = message["content"] or ""
    if message["role"] != "assistant":
        trimmed = family is LLAMA and message["role"] == "user"
        return [message["role"], content.strip() if trimmed else content]
    arguments = [
        sorted(
            (key, repr(value))
            for key, value in json.loads(each["function"]["arguments"], object_pairs_hook=list)
        )
        for each in message.get("tool_calls") or ()
    ]
    return ["assistant", content.strip(), arguments]


def _but_ids(message: Message) -> list[Any]:
    return [message["content"], [each["function"] for each in message.get("tool_calls") or ()]]


class Talk:
    """Clients, and all that they know. They go on from what they heard, from what others heard, and edit it."""

    def __init__(self, chat: Chat, seed: int) -> None:
        self._chat = chat
        self._random = random.Random(seed)
        self.heard: list[HeardTurn] = []
        self.origins: dict[str, int] = {}
        self._rid = 0

    async def run(self, requests: int) -> None:
        while requests > 0:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_AT_ONCE, requests)):
                    tasks.start_soon(self._ask)
            requests -= _AT_ONCE

    async def _ask(self) -> None:
        some = self._random
        session = some.choice(_SESSIONS)
        before = some.choice(self.heard[-30:]) if self.heard and some.random() < 0.8 else None
        if before is not None and some.random() < 0.7:  # mostly its own
            mine = [heard for heard in self.heard[-60:] if heard.session == session]
            before = some.choice(mine) if mine else before
        messages = self._next(before)
        known = list(self.heard)
        self._rid += 1
        rid = f"r{self._rid}"
        body = {"messages": messages, "rid": rid, "tools": TOOLS, "max_tokens": 120, "return_token_ids": True}
        headers = {} if session is None else {"X-Session-Id": session}
        if some.random() < 0.3:
            body["session_id"] = "the body's"
            headers = headers or {"X-SMG-Routing-Key": "anonymous"}
        if not headers:
            body.pop("session_id", None)
        answer = await self._chat.running.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        [choice] = document["choices"]
        [entry] = self._chat.journal.entries(rid)
        assert document["prompt_token_ids"] == list(entry.input_ids)
        assert choice["token_ids"] == list(entry.output_ids)
        assert choice["exact"]
        name = session or headers.get("X-SMG-Routing-Key")
        message = {key: value for key, value in choice["message"].items() if key != "refusal"}
        heard = HeardTurn(name, [*messages, message], entry, self._may_take(name, messages, known))
        self._check_words(messages, entry)
        self._check_parent(document["history"], heard, known)
        self.origins[document["history"]] = self.origins.get(document["history"], 0) + 1
        self.heard.append(heard)

    def _may_take(
        self, session: str | None, messages: Sequence[Message], known: Sequence[HeardTurn]
    ) -> set[HeardTurn]:
        """Answers that may be the session's own in this conversation, by what was ``known`` when it asked."""
        if session is None:
            return set(known)
        own = [heard for heard in known if heard.session == session]
        spoken = [
            heard.before
            for heard in own
            if len(heard.messages) <= len(messages) + 1
            and self._read_alike(heard.messages[:-1], messages[: len(heard.messages) - 1])
        ]
        return set(own).union(*spoken) if spoken else set(known)

    def _read_alike(self, one: Sequence[Message], other: Sequence[Message]) -> bool:
        family = self._chat.family
        return [_essence(each, family) for each in one] == [_essence(each, family) for each in other]

    def _check_parent(self, origin: str, heard: HeardTurn, known: Sequence[HeardTurn]) -> None:
        """Check the answer that the prompt goes on from, and that it says so."""
        asked = heard.messages[:-1]
        place = max((place for place, each in enumerate(asked) if each["role"] == "assistant"), default=-1)
        taken = [
            each
            for each in (heard.before | self._at_once(known))
            if list(heard.entry.input_ids[: len(each.tokens)]) == each.tokens
            and self._read_alike(each.messages, asked[: place + 1])
        ]
        if origin in ("exact", "restored"):
            assert taken, "not the tokens of the turn before, or not its own"
            parent = max(taken, key=lambda each: each.session == heard.session)
            heard.chain = [*parent.chain, parent]
        if origin == "restored":
            meant = [
                one
                for one in heard.before
                if one.session == heard.session
                and one.messages[:-1] == asked[:place]
                and self._read_alike(one.messages[-1:], asked[place : place + 1])
            ]
            spelt = {json.dumps(_but_ids(one.messages[-1])) for one in meant}
            assert len(spelt) <= 1 or self._chat.family is QWEN3, "another answer could be meant"
        if origin == "exact" and self._chat.family is QWEN2_5:
            assert any(
                [each["content"] or "" for each in one.messages]
                == [each["content"] or "" for each in asked[: place + 1]]
                for one in taken
            )

    def _at_once(self, known: Sequence[HeardTurn]) -> set[HeardTurn]:
        """Answers that came while this request was on its way."""
        return set(self.heard[len(known) :])

    def _check_words(self, messages: Sequence[Message], entry: JournalEntry) -> None:
        """The engine got what the client says, to the letter; only answers may be as they were sampled."""
        text = self._chat.read(entry.input_ids)
        place = 0
        for message in messages:
            if message["role"] == "assistant":
                continue
            shown = message["content"]
            if self._chat.family is LLAMA:
                shown = shown.strip() if message["role"] == "user" else f'"{shown}"'.replace("\n", "\\n")
            end = "\n</tool_response>" if message["role"] == "tool" else self._chat.family.eos
            if self._chat.family is LLAMA:
                end = "<|eot_id|>"
            found = text.find(f"\n{shown}{end}", place)
            assert found >= 0, (messages, text)
            place = found + len(shown)

    def _next(self, before: HeardTurn | None) -> list[Message]:
        """The next request of a client that has ``before``."""
        some = self._random
        if before is None:
            asked = {"role": "user", "content": some.choice(_PROMPTS)}
            if some.random() < 0.7:
                return [asked]
            example = {"role": "assistant", "content": some.choice(_WORDS)}
            return [asked, example, {"role": "user", "content": some.choice(_PROMPTS)}]
        *messages, answer = before.messages
        answer = self._returned(answer)
        calls = answer.get("tool_calls")
        if calls:
            told = {"role": "tool", "content": some.choice(_RESULTS), "tool_call_id": calls[0]["id"]}
            return [*messages, answer, told]
        return [*messages, answer, {"role": "user", "content": some.choice(_PROMPTS)}]

    def _returned(self, answer: Message) -> Message:
        """``answer`` as it comes back: mostly verbatim, else as clients change it, else edited."""
        some, changed = self._random, dict(answer)
        habit = some.random()
        if habit < 0.5:
            return changed
        if habit < 0.65:
            changed.pop("reasoning_content", None)
        elif habit < 0.8:
            changed["content"] = (changed["content"] or "").strip()
        elif habit < 0.9 and not changed.get("tool_calls"):
            changed["content"] = some.choice(_WORDS)
        elif changed.get("tool_calls"):
            [call] = changed["tool_calls"]
            function = {**call["function"], "arguments": some.choice(_ARGUMENTS)}
            changed["tool_calls"] = [{**call, "function": function}]
        return changed

    async def check_samples(self) -> dict[str, int]:
        """Check that mask 1 is only on tokens that the session sampled, or went on from. Returns counts."""
        counts = {"samples": 0, "own": 0, "taken": 0}
        for session in sorted({heard.session for heard in self.heard if heard.session is not None}):
            mine = [heard for heard in self.heard if heard.session == session]
            for leaf in await self._chat.trajectories(session):
                last = [heard for heard in mine if heard.tokens == leaf["tokens"]]
                assert last, "a sample is what an engine consumed and sampled for this session"
                assert leaf["exact"], leaf["inexact_reason"]
                counts["samples"] += 1
                own, taken = self._check_masks(leaf, last, mine)
                counts["own"] += own
                counts["taken"] += taken
        return counts

    def _check_masks(
        self, leaf: dict[str, Any], last: Sequence[HeardTurn], mine: Sequence[HeardTurn]
    ) -> tuple[int, int]:
        """Count the tokens with mask 1 that are the session's own, and those that it went on from."""
        mask = leaf["loss_mask"]
        before = [heard.before for heard in last]
        own = self._mask_of(leaf, [one for one in (*last[0].chain, last[0]) if one in mine])
        may_be = self._mask_of(leaf, set(mine).union(*before), cut=True)
        assert all(known <= one <= other for known, one, other in zip(own, mask, may_be, strict=True))
        return sum(own), sum(mask) - sum(own)

    def _mask_of(self, leaf: dict[str, Any], heard: Iterable[HeardTurn], *, cut: bool = False) -> list[int]:
        """1 where one of the answers ``heard`` was sampled, behind these very tokens; or a part of it, if ``cut``."""
        tokens = leaf["tokens"]
        mask = [0] * len(tokens)
        for each in heard:
            start, end = len(each.entry.input_ids), len(each.tokens)
            if tokens[:start] == each.tokens[:start]:
                kept = len(list(takewhile(bool, map(eq, tokens[start:], each.tokens[start:]))))
                if cut or start + kept == end:
                    mask[start : start + kept] = [1] * kept
        return mask


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        (QWEN2_5, ()),
        (QWEN3, ()),
        (LLAMA, ()),
        (QWEN3, ("--history-max-bytes", "40000")),
    ],
    ids=["qwen2.5", "qwen3", "llama3.1", "little room"],
)
async def test_every_token_is_the_engines_and_every_sample_its_sessions(
    start: Start, family: Family, flags: tuple[str, ...]
) -> None:
    async with chatting(start, _says(family), family=family, flags=flags) as chat:
        talk = Talk(chat, seed=_REQUESTS)
        await talk.run(_REQUESTS // 5)
        counts = await talk.check_samples()
    print(f"{family.name:10} {talk.origins} {counts}")  # noqa: T201  # what was met
    assert talk.origins.keys() >= {"exact", "fresh"}
    assert family is LLAMA or "restored" in talk.origins
    assert min(counts.values())


async def test_conversations_go_on_over_restarts_from_a_store(start: Start, tmp_path: Path) -> None:
    """Memory has room for nothing, so all comes from the disk, also what earlier routers heard."""
    memory = ("--radix-tree-max-size", "1", "--history-max-bytes", "1", "--store-memory-bytes", "40960")
    disk = ("--store-ssd", str(tmp_path / "store"), "--store-ssd-bytes", str(1 << 22))
    async with chatting(start, _says(QWEN3), family=QWEN3) as chat:
        talk = Talk(chat, seed=_REQUESTS)
        router = ("--plugin", "radix_cache", "--hf-checkpoint", chat.engine.checkpoint, "--plugin", "openai")
        for _ in range(3):
            flags = (*router, "--worker-urls", chat.engine.url, "--plugin", "tiered_store", *memory, *disk)
            async with start(*flags) as chat.running:
                while (await chat.running.client.get("/readiness")).status_code != 200:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await talk.run(_REQUESTS // 60)
                counts = await talk.check_samples()
    assert talk.origins.keys() >= {"exact", "fresh"}
    assert counts["own"]
