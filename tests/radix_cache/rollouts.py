"""Conversations of every shape with an adversarial engine through a router, each step held against all facts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import orjson

from radix_cache.adversary import Adversary
from radix_cache.facts import Fact, facts_of, goes_on
from radix_cache.judge import Judge
from radix_cache.reading import Detokenizer
from radix_cache.turns import Turn, parameters_of, say
from router_core.cli import build
from router_core.serving import serving
from slime_radix_cache.checkpoint import eos_ids
from slime_radix_cache.encoding import Encoder

if TYPE_CHECKING:
    from router_core.types import Tokenizer

__all__ = ["CHATML", "Conversation", "Markup", "Stage", "staged"]

#: How a client makes its next prompt out of what it got.
MANNERS = (
    *("template", "template", "template", "strip", "cut", "close"),
    *("append", "bare", "replace", "repeat", "ids"),
)


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
    ("<|im_start|>", "<|im_end|>", "<think>", "<|endoftext|>"),
)


@dataclass
class Conversation:
    """``text`` is the next prompt while it is open, else all that was said, of which ``prompt`` was asked.

    ``name``: of its session, which it may share with other samples of its group; None: it has none. ``given``: the next
    prompt is sent as these ids.
    """

    name: str | None
    text: str
    prompt: str = ""
    given: list[int] | None = None
    failed: bool = False


class Stage:
    """A router with an adversarial engine behind it, and everything that was said."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        engine: Adversary,
        markup: Markup,
        special: Collection[str],
        *,
        resume: bool,
        spaces: bool,
    ) -> None:
        self.client = client
        self.engine = engine
        self.markup = markup
        self.resume = resume
        self.reader = engine.reader
        self.judge = Judge(self._reads if spaces else self._is_exactly, special)
        self.conversations: list[Conversation] = []
        self.outcomes: Counter[str] = Counter()
        self.shapes: Counter[str] = Counter()
        self.turns = 0
        self._names = count()

    def _is_exactly(self, before: list[int], ids: list[int], text: str) -> bool:
        return ids == list(self.reader.tokenizer.encode(text, add_special_tokens=False))

    def _reads(self, before: list[int], ids: list[int], text: str) -> bool:
        """A tokenizer may put spaces of its own before a text and behind special tokens: they read the same."""
        read = self.reader.decode([*before, *ids])
        return self._is_exactly(before, ids, text) or _squeezed(read).endswith(_squeezed(text))

    def begin(self, text: str, name: str | None = "") -> Conversation:
        """A new conversation that will ask with ``text``; in a session of its own unless one is named, or None."""
        conversation = Conversation(f"s{next(self._names)}" if name == "" else name, text)
        self.conversations.append(conversation)
        return conversation

    def asked(self, random: Random) -> str:
        """What a user says next, with all that leads the model to answer."""
        return self.markup.ask.format(
            random.choice(("Why?", "日本語で答えて 😀", "the harbour wakes", "a  b\n\n c"))
        )

    async def all_turn(self, conversations: Sequence[Conversation], random: Random) -> None:
        """A turn of each at once, one conversation of a session, and those without one in batches of their own."""
        turns: list[Turn] = []
        spoken: set[str] = set()
        batch = {one.text: one for one in conversations if one.name is None and one.given is None}
        if batch:
            turns.append(self._turn(list(batch.values()), random))
        for one in conversations:
            if one.name is None and one.given is None:
                continue
            if one.name is not None and one.name in spoken:
                continue
            spoken.add(one.name or "")
            turns.append(self._turn([one], random))
        async with anyio.create_task_group() as tasks:
            for turn in turns:
                tasks.start_soon(self._speak, turn)
        await self.settle(turns)

    def _turn(self, conversations: list[Conversation], random: Random) -> Turn:
        self.turns += 1
        copies = random.choice((1, 1, 1, 1, 1, 1, 1, 3)) if conversations[0].name is not None else 1
        each = [parameters_of(random, self.reader, self.markup.special) for _ in conversations]
        if copies > 1:
            each[0]["n"] = copies
        turn = Turn(
            str(self.turns),
            conversations[0].name,
            [one.text for one in conversations],
            [one.given for one in conversations if one.given is not None] or None,
            each,
            copies,
            known=len(self.judge.facts),
            luck=Random(random.random()),
        )
        turn.decide(aborts=self.engine.aborts)
        for _ in range(copies - 1):
            conversations.append(self.begin(conversations[0].text, conversations[0].name))
        turn.conversations = conversations
        self.shapes.update(turn.shapes())
        return turn

    async def _speak(self, turn: Turn) -> None:
        with anyio.fail_after(30):
            turn.heard = await say(turn, self.client, self.engine)

    async def settle(self, turns: Sequence[Turn]) -> None:
        """Hold what was sent and heard against the facts that came of it."""
        stats = (await self.client.get("/cache_stats")).json()
        self.judge.evicted = bool(stats["evictions"])
        assert stats["unrecorded"].keys() <= {"nothing_sampled"}, stats["unrecorded"]
        new: dict[Fact, Turn] = {}
        for turn in turns:
            facts = self._facts(turn)
            turn.check(facts, self.reader)
            new |= dict.fromkeys(facts, turn)
        if stats["tokenizer"]["refused"]:
            return
        for fact, turn in sorted(new.items(), key=lambda pair: pair[0].number):
            self.judge.take(fact, turn.known, given=turn.given is not None)

    def _facts(self, turn: Turn) -> list[Fact]:
        attempts = self.engine.of(turn.name)
        resume = self.resume and not turn.abort and not (turn.stream and turn.size > 1)
        found: list[Fact] = []
        for place, text in enumerate(turn.texts(self.reader)):
            own = attempts[place * turn.copies : (place + 1) * turn.copies]
            for attempt in attempts[turn.size :]:  # aborted ones made again, or continued
                if any(goes_on(before, attempt, resume=resume) for before in own):
                    own.append(attempt)
            parameters = turn.parameters[place]
            found += facts_of(own, self.reader, text, turn.session, parameters, resume=resume)
        return found

    async def go_on(self, conversation: Conversation, random: Random) -> None:
        """Make the next prompt in one of the manners of clients."""
        if conversation.failed:
            return  # the same again
        conversation.given = None
        prompt = conversation.prompt
        answer = conversation.text[len(prompt) :]
        manner = random.choice(MANNERS)
        if manner == "ids":
            known = await self.retrieve(conversation.text, conversation.name)
            size = len(known["tokens"])
            kept = known["tokens"][: random.choice((size, size, random.randint(1, size)))]
            conversation.given = kept + list(
                self.reader.tokenizer.encode(self.asked(random), add_special_tokens=False)
            )
            conversation.text = self.reader.decode(conversation.given)
            return
        if manner == "repeat":
            conversation.text = prompt or conversation.text
            return
        if manner == "strip":
            answer = answer.strip()
        elif manner == "cut":
            answer = answer[: random.randrange(len(answer) + 1)]
        elif manner == "close":  # where the model went on with what special tokens begin with, too
            answer = answer[: answer.find(self.markup.end[0]) if random.random() < 0.5 else len(answer) // 2]
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

    async def retrieve(self, text: str, session: str | None) -> dict[str, Any]:
        """What the router says of ``text``."""
        asked = {"text": text} | ({"session_id": session} if session is not None else {})
        answer = await self.client.post("/retrieve_from_text", json=asked)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = orjson.loads(answer.content)
        return document

    async def read(self, text: str, session: str | None) -> str | None:
        """Ask for ``text`` and judge what is said; returns why it is not exact."""
        answer = await self.retrieve(text, session)
        self.judge.judge(answer, text, session)
        await self._read_packed(text, session, answer)
        reason: str | None = answer["inexact_reason"]
        return reason

    async def _read_packed(self, text: str, session: str | None, told: dict[str, Any]) -> None:
        """The arrays of another format say the same."""
        asked = {"text": text, "session_id": session}
        accept = {"accept": "application/x-msgpack"}
        packed = msgpack.unpackb(
            (await self.client.post("/retrieve_from_text", json=asked, headers=accept)).content
        )
        arrays = {
            name: np.frombuffer(packed[name]["data"], packed[name]["dtype"])
            for name in ("tokens", "loss_mask", "rollout_logp", "version_index")
        }
        names = [*packed["version_names"], -1]
        wanted = np.array(told["rollout_logp"], np.float64)  # None becomes NaN
        assert arrays["tokens"].tolist() == told["tokens"]
        assert arrays["loss_mask"].tolist() == told["loss_mask"]
        assert np.array_equal(arrays["rollout_logp"], wanted, equal_nan=True)
        assert [names[one] for one in arrays["version_index"]] == told["generation_versions"]

    async def judge_all(self) -> None:
        """Every conversation's last text, and every session."""
        await self.settle([])
        for conversation in self.conversations:
            reason = await self.read(conversation.text, conversation.name)
            self.outcomes[reason or "exact"] += 1
        for name in {one.name for one in self.conversations} - {None}:
            answer = await self.client.get(f"/trajectories/{name}")
            if answer.status_code == 404:
                facts = [fact for fact in self.judge.facts if fact.session == name and fact.sure]
                assert self.judge.evicted or not facts
            else:
                self.judge.judge_session(answer.json()["trajectories"], str(name))


def _squeezed(text: str) -> str:
    return unicodedata.normalize("NFC", "".join(text.split()))


def _special(checkpoint: str) -> list[str]:
    vocabulary = orjson.loads(Path(checkpoint, "tokenizer.json").read_bytes())
    return [token["content"] for token in vocabulary["added_tokens"]]


@asynccontextmanager
async def staged(
    tokenizer: Tokenizer,
    checkpoint: str,
    markup: Markup,
    *flags: str,
    seed: int = 0,
    retries: int = 0,
    resume: bool = False,
) -> AsyncIterator[Stage]:
    """A router with ``checkpoint`` in front of an adversary with ``tokenizer``, both on loopback ports."""
    abilities = Encoder(tokenizer).abilities
    reader = Detokenizer(tokenizer, eos_ids(tokenizer), one_reading=not abilities.lead)
    engine = Adversary(reader, Random(seed), markup.special, aborts=retries > 0 or seed % 2 > 0)
    async with serving(engine.app) as worker:
        arguments = ["--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--worker-urls", worker]
        arguments += ["--abort-retries", str(retries), "--abort-retry-wait-s", "0", *flags]
        arguments += ["--resume-aborted"] if resume else []
        _, app = build(["--no-default-plugins", *arguments])
        async with (
            serving(app) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
        ):
            spaces = bool(abilities.guards)
            resumes = resume and retries > 0
            yield Stage(client, engine, markup, _special(checkpoint), resume=resumes, spaces=spaces)
