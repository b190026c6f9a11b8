"""Conversations with an adversarial engine through a router, and the judge of what the router says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson

from radix_cache.adversary import Adversary, Entry, odd_plan
from radix_cache.scripted import bits
from router_core.cli import build
from router_core.serving import serving

if TYPE_CHECKING:
    from router_core.types import Tokenizer

#: How a client makes its next prompt out of what it got.
MANNERS = ("template", "template", "template", "strip", "cut", "append", "bare", "replace", "repeat")


@dataclass(frozen=True)
class Markup:
    """How turns are written for a model: ``ask`` has a place for the question, ``end`` is the EOS."""

    system: str
    ask: str
    end: str
    special: tuple[str, ...] = ()


CHATML = Markup(
    "<|im_start|>system\nYou help. ☔<|im_end|>\n",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|>",
    ("<|im_start|>", "<|im_end|>", "<think>"),
)


@dataclass
class Conversation:
    """One session: ``text`` is the next prompt while it is open, else all that was said.

    ``turns``: prompt and request id of those that were answered with tokens, those of its fork's origin before its own.
    """

    name: str
    text: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    left_early: bool = False
    failed: bool = False


class Stage:
    """A router with an adversarial engine behind it, and everything that was said."""

    def __init__(self, client: httpx.AsyncClient, engine: Adversary, markup: Markup) -> None:
        self.client = client
        self.engine = engine
        self.markup = markup
        self.conversations: list[Conversation] = []
        self.said: dict[str, tuple[str, str]] = {}
        self.outcomes: Counter[str] = Counter()
        self.turns = 0
        self.evicted = False

    def begin(self, text: str, origin: Conversation | None = None) -> Conversation:
        """A new session that will ask with ``text``."""
        turns = list(origin.turns) if origin is not None else []
        conversation = Conversation(f"s{len(self.conversations)}", text, turns)
        self.conversations.append(conversation)
        return conversation

    def asked(self, random: Random) -> str:
        """What a user says next, with all that leads the model to answer."""
        return self.markup.ask.format(
            random.choice(("Why?", "日本語で答えて 😀", "the harbour wakes", "a  b\n\n c"))
        )

    async def all_turn(self, conversations: list[Conversation], random: Random) -> None:
        """A turn of each at once."""
        async with anyio.create_task_group() as tasks:
            for conversation in conversations:
                tasks.start_soon(self.turn, conversation, Random(random.random()))

    async def turn(self, conversation: Conversation, random: Random) -> None:
        """Ask, and read the answer, or only its beginning."""
        self.turns += 1
        rid = f"r{self.turns}"
        plan = odd_plan(random, self.engine.tokenizer, self.markup.special, self.markup.end)
        self.engine.plans[rid] = replace(plan, ids=list(plan.ids))
        stream = random.random() < 0.4
        body: dict[str, Any] = {
            "text": conversation.text,
            "rid": rid,
            "stream": stream,
            "sampling_params": {"skip_special_tokens": plan.skip_special},
        }
        headers = {"x-session-id": conversation.name}
        conversation.left_early = conversation.failed = False
        prompt = conversation.text
        if stream and plan.ending not in ("error", "waiting"):
            leave = random.choice([None, None, 1, 4])
            text, complete = await self._read_stream(body, headers, leave)
            conversation.left_early = not complete
        else:
            body["stream"] = False
            answer = await self.client.post("/generate", json=body, headers=headers)
            if plan.ending == "error":
                assert answer.status_code == 500
            else:
                assert answer.status_code == 200, answer.text
            text = answer.json().get("text", "")
        if plan.ending in ("error", "waiting"):
            conversation.failed = True
            return
        self.said[rid] = (prompt, conversation.name)
        conversation.turns.append((prompt, rid))
        conversation.text = prompt + text

    async def _read_stream(
        self, body: dict[str, Any], headers: dict[str, str], leave: int | None
    ) -> tuple[str, bool]:
        text = ""
        async with self.client.stream("POST", "/generate", json=body, headers=headers) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = orjson.loads(line[6:])
                    incremental = len(event["output_ids"]) < event["meta_info"]["completion_tokens"]
                    text = text + event["text"] if incremental else event["text"]
                    if leave is not None and len(text) >= leave:
                        return text, event["meta_info"]["finish_reason"] is not None
        return text, True

    def go_on(self, conversation: Conversation, random: Random) -> None:
        """Make the next prompt in one of the manners of clients."""
        if conversation.failed:
            return  # the same again
        manner = random.choice(MANNERS)
        prompt = conversation.turns[-1][0] if conversation.turns else ""
        answer = conversation.text[len(prompt) :]
        if manner == "repeat":
            conversation.text = prompt or conversation.text
            return
        if manner == "strip":
            answer = answer.strip()
        elif manner == "cut":
            answer = answer[: random.randrange(len(answer) + 1)]
        elif manner == "replace" and answer:
            place = random.randrange(len(answer))
            answer = answer[:place] + "Z" + answer[place + 1 :]
        conversation.text = prompt + answer
        if manner in ("cut", "append"):
            conversation.text += "\n<tool_response>42</tool_response>\n"
        elif manner == "bare":
            conversation.text += random.choice(("x", " the", "\n", "語"))
        else:
            conversation.text += self.markup.end + "\n" + self.asked(random)

    async def retrieve(self, text: str, session: str) -> dict[str, Any]:
        """What the router says of ``text``."""
        answer = await self.client.post("/retrieve_from_text", json={"text": text, "session_id": session})
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = orjson.loads(answer.content)
        return document

    async def see_evictions(self) -> None:
        """Ask whether anything had to go so far: then less is known than was said."""
        self.evicted = bool((await self.client.get("/cache_stats")).json()["evictions"])

    async def judge_all(self) -> None:
        """Every conversation's last text, held against the journal."""
        await self.see_evictions()
        for conversation in self.conversations:
            answer = await self.retrieve(conversation.text, conversation.name)
            self.outcomes[answer["inexact_reason"] or "exact"] += 1
            self.judge(answer, conversation.text, conversation.name)
            self._judge_last(conversation, answer)

    def _judge_last(self, conversation: Conversation, answer: dict[str, Any]) -> None:
        """What was sent and received whole, and not forgotten, has to be exact."""
        reason = answer["inexact_reason"]
        if not conversation.turns or conversation.failed or self.evicted or conversation.left_early:
            return
        entry = self.engine.journal[conversation.turns[-1][1]]
        if reason == "no_logprobs":
            assert answer["tokens"] == entry.tokens
            return
        assert reason is None, (reason, conversation, entry)
        assert answer["tokens"] == entry.tokens, (conversation, entry)
        own = [(prompt, rid) for prompt, rid in conversation.turns if self.said[rid][1] == conversation.name]
        for (prompt, rid), (following, _) in pairwise([*own, (conversation.text, "")]):
            entry = self.engine.journal[rid]
            until = len(entry.consumed) + self._kept(prompt, entry, following)
            if answer["tokens"][:until] == entry.tokens[:until]:
                assert all(answer["loss_mask"][len(entry.consumed) : until]), (rid, conversation)

    def _kept(self, prompt: str, entry: Entry, following: str) -> int:
        """How many of an answer's tokens are to be seen in the next prompt, which is ``following``."""
        kept = 0
        for skip_special in (True, False):
            before = ""
            for length in range(1, len(entry.sampled) + 1):
                text = self.engine.read(entry.consumed, entry.sampled[:length], skip_special)
                if len(text) > len(before) and text.strip() and not text.endswith("\ufffd"):
                    if not (prompt + entry.text).startswith(prompt + text) or not following.startswith(
                        prompt + text
                    ):
                        break
                    kept = max(kept, length)
                before = text
        return kept

    def judge(self, answer: dict[str, Any], text: str, session: str) -> None:
        """Raises AssertionError when ``answer`` claims what is not so."""
        tokens, mask = answer["tokens"], answer["loss_mask"]
        assert len(tokens) == len(mask) == len(answer["rollout_logp"]) == len(answer["generation_versions"])
        self._judge_mask(answer)
        reason = answer["inexact_reason"]
        assert answer["exact"] == (reason is None)
        if reason is None:
            stories = [rid for rid in self.said if self._tells(rid, text, tokens)]
            assert stories, (text, tokens)
            assert any(
                self.said[rid][1] == session or len(self.engine.journal[rid].consumed) >= len(tokens)
                for rid in stories
            ) or not any(mask)
            return
        whole = [rid for rid in self.said if self._ends_at(rid, text) and self.said[rid][1] == session]
        match reason:
            case "no_logprobs":
                assert any(self.engine.journal[rid].logprobs is None for rid in self.said)
            case "evicted":
                assert self.evicted
            case "other_session":
                assert self.evicted or not whole
            case "cut_inside_token" | "uncovered_text":
                assert self.evicted or not whole, (reason, text, whole)
            case _:
                raise AssertionError(f"what is {reason}?")

    def _judge_mask(self, answer: dict[str, Any]) -> None:
        """Exact or not: mask 1, a logprob and a version only as an engine gave them in that very context."""
        tokens, mask = answer["tokens"], answer["loss_mask"]
        entries = [
            entry for entry in self.engine.journal.values() if entry.consumed == tokens[: len(entry.consumed)]
        ]
        reach = [_common(entry.tokens, tokens) for entry in entries]
        for place, sampled in enumerate(mask):
            logprob, version = answer["rollout_logp"][place], answer["generation_versions"][place]
            if not sampled:
                assert (logprob, version) == (0.0, -1)
                continue
            assert any(
                len(entry.consumed) <= place < end and _gave(entry, place, logprob, version)
                for entry, end in zip(entries, reach, strict=True)
            ), (place, tokens)

    def _texts(self, rid: str) -> tuple[str, str]:
        """The text up to the visible end of an answer, and with the hidden tokens."""
        prompt, entry = self.said[rid][0], self.engine.journal[rid]
        return prompt + entry.text, prompt + self.engine.read(
            entry.consumed, entry.sampled, skip_special=False
        )

    def _ends_at(self, rid: str, text: str) -> bool:
        return text == self._texts(rid)[0]

    def _tells(self, rid: str, text: str, tokens: list[int]) -> bool:
        """True when ``tokens`` are what this request made of ``text``."""
        prompt, entry = self.said[rid][0], self.engine.journal[rid]
        if tokens == entry.tokens:
            return text in self._texts(rid)
        if tokens != entry.tokens[: len(tokens)]:
            return False
        if text == prompt:
            return tokens == entry.consumed
        shown = entry.sampled[: len(tokens) - len(entry.consumed)]
        return any(text == prompt + self.engine.read(entry.consumed, shown, skip) for skip in (True, False))


def _gave(entry: Entry, place: int, logprob: float | None, version: str) -> bool:
    if version != entry.version:
        return False
    if entry.logprobs is None:
        return logprob is None
    return logprob is not None and bits([logprob]) == bits([entry.logprobs[place - len(entry.consumed)]])


def _common(one: list[int], other: list[int]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


@asynccontextmanager
async def staged(tokenizer: Tokenizer, checkpoint: str, markup: Markup, *flags: str) -> AsyncIterator[Stage]:
    """A router with ``checkpoint`` in front of an adversary with ``tokenizer``, both on loopback ports."""
    engine = Adversary(tokenizer)
    async with serving(engine.app) as worker:
        arguments = ["--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--worker-urls", worker]
        arguments += ["--abort-retries", "0", *flags]
        _, app = build(["--no-default-plugins", *arguments])
        async with (
            serving(app) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
        ):
            yield Stage(client, engine, markup)
