"""Conversations of every shape with an adversarial engine through a router, each step held against all facts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import orjson

from deadlines import HANG_S
from radix_cache.machine.adversary import Adversary, Attempt, Pause
from radix_cache.machine.audit import Audit
from radix_cache.machine.expert_audit import check_experts
from radix_cache.machine.experts import EXPERTS, SHAPE, rows_in
from radix_cache.machine.facts import Fact, facts_of, goes_on
from radix_cache.machine.judge import Judge
from radix_cache.machine.lies import LIES, NOTHING_LEFT
from radix_cache.machine.reading import Detokenizer
from radix_cache.machine.turns import Turn, parameters_of, say
from radix_cache.machine.worlds import CALM, World
from router_core.cli import build
from routers import BARE
from slime_http.serving import serving
from slime_radix_cache.tokens.checkpoint import eos_ids
from slime_radix_cache.tokens.encoding import Encoder

if TYPE_CHECKING:
    from router_core.types import Tokenizer
    from slime_radix_cache.tokens.abilities import Abilities

__all__ = [
    *("BORROWS", "CHATML", "Conversation", "Markup", "Stage"),
    *("acting", "expert_flags", "routed", "stage_of", "staged"),
]

#: Ways of a client to make its next prompt out of an answer.
MANNERS = (
    *("template", "template", "template", "strip", "cut", "close"),
    *("append", "bare", "replace", "repeat", "ids"),
)
#: The same where a client writes what was answered to another one.
BORROWS = ("borrow", "borrow", "borrow_bare", "borrow_ids")


@dataclass(frozen=True)
class Markup:
    """A model's markup of turns: ``ask`` has a place for the question, ``end`` is the EOS."""

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
        world: World = CALM,
    ) -> None:
        self.client = client
        self.engine = engine
        self.markup = markup
        self.resume = resume
        self.world = world
        self.reader = engine.reader
        self.judge = Judge(self._reads if spaces else self._is_exactly, special)
        self.audit = Audit(self.judge)
        self.conversations: list[Conversation] = []
        self.outcomes: Counter[str] = Counter()
        self.experts: Counter[str] = Counter()
        self.shapes: Counter[str] = Counter()
        self.turns = 0
        self._names = count()
        self._answers: dict[str, list[str]] = {}
        first = engine.luck.randrange(len(LIES))
        self._lies = cycle(LIES[first:] + LIES[:first])

    def _is_exactly(self, before: list[int], ids: list[int], text: str) -> bool:
        return ids == list(self.reader.tokenizer.encode(text, add_special_tokens=False))

    def _reads(self, before: list[int], ids: list[int], text: str) -> bool:
        """A tokenizer may put spaces of its own before a text and behind special tokens: they read the same.

        Behind half a character single bytes are read as part of that, so the tokens are read alone, too.
        """
        reads = (self.reader.decode([*before, *ids]), self.reader.decode(ids))
        return self._is_exactly(before, ids, text) or any(
            _squeezed(read).endswith(_squeezed(text)) for read in reads
        )

    def begin(self, text: str, name: str | None = "") -> Conversation:
        """A new conversation that will ask with ``text``; in a session of its own unless one is named, or None."""
        conversation = Conversation(f"s{next(self._names)}" if name == "" else name, text)
        self.conversations.append(conversation)
        return conversation

    def asked(self, random: Random) -> str:
        """Return a user's next message, with all that leads the model to answer."""
        return self.markup.ask.format(
            random.choice(("Why?", "日本語で答えて 😀", "the harbour wakes", "a  b\n\n c"))
        )

    async def all_turn(self, conversations: Sequence[Conversation], random: Random) -> None:
        """A turn of each at once, one conversation of a session or a batch, and those without one in a batch."""
        turns: list[Turn] = []
        for name in dict.fromkeys(one.name for one in conversations):
            same = [one for one in conversations if one.name == name]
            texts = {one.text: one for one in same if one.given is None}
            if texts and (name is None or (len(texts) > 1 and random.random() < self.world.crowds)):
                turns.append(self.turn(list(texts.values()), random))
                same = [one for one in same if one.given is not None]
            elif name is not None:
                same = same[: 1 if random.random() >= self.world.crowds else None]
            turns += [self.turn([one], random) for one in same]
        async with anyio.create_task_group() as tasks:
            for turn in turns:
                tasks.start_soon(self.speak, turn)
        if self.resume and any(turn.leave is not None for turn in turns):
            await self._quiet()
        await self.settle(turns)

    async def _quiet(self) -> None:
        """Wait until nothing is asked any more for clients that have left."""
        known = -1
        while known != len(self.engine.attempts):
            known = len(self.engine.attempts)
            await anyio.sleep(0.03)

    def turn(self, conversations: list[Conversation], random: Random, *, calm: bool = False) -> Turn:
        """A request of these, the first of which may ask for some answers; a ``calm`` one ends well, and has one."""
        self.turns += 1
        copies = 1
        if conversations[0].name is not None and len(conversations) == 1 and not calm:
            copies = random.choice((1, 1, 1, 1, 1, 1, 1, 3))
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
        turn.decide(CALM if calm else self.world, self._lies, aborts=self.engine.aborts and not calm)
        if calm:
            turn.leave = None
        for _ in range(copies - 1):
            conversations.append(self.begin(conversations[0].text, conversations[0].name))
        turn.conversations = conversations
        self.shapes.update(turn.shapes())
        return turn

    async def speak(self, turn: Turn) -> None:
        """Let a turn be made, to its end."""
        with anyio.fail_after(HANG_S):
            turn.heard = await say(turn, self.client, self.engine)

    async def settle(self, turns: Sequence[Turn]) -> None:
        """Hold what was sent and heard against the facts that came of it."""
        judge, stats = self.judge, await self.look()
        if not any(attempt.lie for attempt in self.engine.attempts):
            assert stats["unrecorded"].keys() <= {"nothing_sampled"}, stats["unrecorded"]
            assert not stats["contradictions"], stats["contradictions"]
        asking = Counter(turn.session for turn in turns for _ in turn.prompts)
        new: dict[Fact, Turn] = {}
        for turn in turns:
            facts = self.facts(turn)
            turn.check(facts, self.engine.of(turn.name), self.reader)
            for conversation in turn.conversations:
                self.remember(conversation)
            new |= dict.fromkeys(facts, turn)
        if not stats["tokenizer"]["refused"]:
            for fact, turn in sorted(new.items(), key=lambda pair: pair[0].number):
                judge.take(fact, turn.known, alone=asking[turn.session] == 1)
        for turn in turns:
            self.note_losses(turn)
            if turn.heard is None:
                judge.refused += [turn.asked(place, self.reader) for place in range(len(turn.prompts))]

    def remember(self, conversation: Conversation) -> None:
        """Note an answer that another client may write."""
        answer = conversation.text[len(conversation.prompt) :]
        self._answers.setdefault(conversation.prompt, []).append(answer)

    async def look(self) -> dict[str, Any]:
        """Return the router's counters, and note that something was evicted."""
        stats: dict[str, Any] = (await self.client.get("/cache_stats")).json()
        self.judge.evicted = self.judge.evicted or bool(stats["evictions"])
        self.shapes["evicted"] += bool(stats["evictions"])
        return stats

    async def overlap(
        self, conversation: Conversation, random: Random, *, borrows: bool | None = None
    ) -> None:
        """A session reads and asks while an answer to it is under way; it may write what another one was answered."""
        session, engine = conversation.name, self.engine
        turn = self.turn([conversation], random, calm=True)
        pause = engine.pauses[turn.name] = Pause(random.randint(0, 6))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.speak, turn)
            await pause.reached.wait()
            await anyio.sleep(0.01)  # what was sent is heard
            (fact,) = self.facts(turn)
            (heard,) = turn.so_far
            fact.in_flight, fact.was_in_flight, ended, fact.ended = True, True, fact.ended, False
            fact.sure, fact.heard = len(heard.ids), heard.text
            self.judge.take(fact, turn.known)
            await self.read(fact.prompt + heard.text, session)
            other = Conversation(session, fact.prompt, prompt=fact.prompt)
            if borrows if borrows is not None else random.random() < 0.4:
                other.text += self._borrowed(fact.prompt, random) + self.markup.end
            elif random.random() < 0.7:
                other.text += heard.text + random.choice(("x", "\n", self.markup.end))
            await self.all_turn([other], random)
            await self.read(other.text, session)
            pause.go.set()
        fact.in_flight, fact.ended = False, ended
        turn.check([fact], engine.of(turn.name), self.reader)

    async def calm_turn(self, conversation: Conversation, random: Random) -> None:
        """A turn that is answered well, and heard to its end."""
        turn = self.turn([conversation], random, calm=True)
        await self.speak(turn)
        await self.settle([turn])

    async def talk(self, session: str, calls: int, random: Random) -> None:
        """So many calls of a session that have nothing to do with what it said."""
        each = [Conversation(session, f"{place} {self.turns}") for place in range(calls)]
        turns = [self.turn([one], random, calm=True) for one in each]
        async with anyio.create_task_group() as tasks:
            for turn in turns:
                tasks.start_soon(self.speak, turn)
        await self.settle(turns)

    def note_losses(self, turn: Turn) -> None:
        """Note the session of a turn that the router could not believe, or never saw, as having lost something."""
        lies = [attempt for attempt in self.engine.of(turn.name) if attempt.lie is not None]
        if not lies and not (turn.media and turn.heard is not None):
            return
        self.judge.marked = True
        if turn.session is None:
            return
        # An abort without tokens that is made again: nobody has heard of it.
        if all(one.lie == NOTHING_LEFT and one.reason["type"] == "abort" for one in lies) and not turn.media:
            self.judge.doubted.add(turn.session)
        else:
            self.judge.lost.add(turn.session)

    def facts(self, turn: Turn) -> list[Fact]:
        """Return the facts of a turn until now; none when it was passed on untouched."""
        if turn.media:
            return []
        attempts = self.engine.of(turn.name)
        is_tried_again = not turn.abort and turn.given is None
        resume = self.resume and is_tried_again and not (turn.stream and turn.size > 1)
        found: list[Fact] = []
        explained: list[Attempt] = []
        for place in range(len(turn.prompts)):
            own = attempts[place * turn.copies : (place + 1) * turn.copies]
            for attempt in attempts[turn.size :]:  # aborted ones made again, or continued
                if any(goes_on(before, attempt, resume=resume) for before in own):
                    own.append(attempt)
            explained += own
            found += facts_of(own, self.reader, turn.asked(place, self.reader), resume=resume)
        for attempt in attempts:
            if all(attempt is not one for one in explained):  # it goes on from what was not so
                assert turn.lie, (turn, attempt)
                for fact in facts_of([attempt], self.reader, turn.asked(0, self.reader), resume=False):
                    fact.lies = ("the attempt before",)
                    self.judge.know(fact)
        return found

    async def go_on(
        self, conversation: Conversation, random: Random, manners: Sequence[str] | None = None
    ) -> None:
        """Make the next prompt in one of the ``manners`` of clients."""
        if conversation.failed:
            return  # the same again
        conversation.given = None
        prompt = conversation.prompt
        answer = conversation.text[len(prompt) :]
        if manners is None:
            manners = BORROWS if random.random() < self.world.borrows else MANNERS
        manner = random.choice(manners)
        if manner.startswith("borrow"):
            answer = self._borrowed(prompt, random, answer)
        if manner in ("ids", "borrow_ids"):
            own = manner == "ids" or random.random() < 0.5
            known = await self.retrieve(prompt + answer, conversation.name if own else None)
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
        elif manner in ("bare", "borrow_bare"):
            conversation.text += random.choice(("x", " the", "\n", "語"))
        else:
            conversation.text += self.markup.end + "\n" + self.asked(random)

    def _borrowed(self, prompt: str, random: Random, own: str = "") -> str:
        """Return another's answer to the same prompt, or else to any, but not the ``own`` answer to the same."""
        same = [answer for answer in self._answers.get(prompt, ()) if answer != own]
        return random.choice(same or random.choice(list(self._answers.values())))

    async def retrieve(self, text: str, session: str | None, *, body: bool = True) -> dict[str, Any]:
        """Return the router's answer on ``text`` to ``session``, named in the ``body`` or in a header."""
        asked: dict[str, Any] = {"text": text, "return_routed_experts": True}
        headers = {}
        if session is not None and body:
            asked["session_id"] = session
        elif session is not None:
            asked["session_id"], headers["x-session-id"] = "nobody", session
        answer = await self.client.post("/retrieve_from_text", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = orjson.loads(answer.content)
        return document

    async def read(self, text: str, session: str | None, *, body: bool = True) -> str | None:
        """Ask for ``text`` and audit what is said; returns why it is not exact."""
        answer = await self.retrieve(text, session, body=body)
        await self.look()  # a stream was recorded for this question, which may need room
        self.audit.check_text(answer, text, session)
        self.experts[check_experts(self.judge, answer) or "exact"] += 1
        await self._read_packed(text, session, answer)
        reason: str | None = answer["inexact_reason"]
        return reason

    async def _read_packed(self, text: str, session: str | None, told: dict[str, Any]) -> None:
        """The arrays of another format say the same."""
        asked = {"text": text, "session_id": session, "return_routed_experts": True}
        accept = {"accept": "application/x-msgpack"}
        packed = msgpack.unpackb(
            (await self.client.post("/retrieve_from_text", json=asked, headers=accept)).content
        )
        arrays = {
            name: np.frombuffer(packed[name]["data"], packed[name]["dtype"])
            for name in ("tokens", "loss_mask", "rollout_logp", "version_index")
        }
        assert (EXPERTS in packed) == told["experts_exact"]
        if told["experts_exact"]:
            rows = np.frombuffer(packed[EXPERTS]["data"], packed[EXPERTS]["dtype"])
            assert rows.tolist() == rows_in(told[EXPERTS]).ravel().tolist()
        assert packed["routed_experts_shape"] == told["routed_experts_shape"]
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
            self.outcomes[(reason or "exact").partition(":")[0]] += 1
        for name in {fact.session for fact in self.judge.facts} - {None}:
            await self.judge_session(str(name))

    async def judge_session(self, name: str) -> None:
        """Check that a session's record is right and complete."""
        judge = self.judge
        answer = await self.client.get(f"/trajectories/{name}?return_routed_experts=true")
        if answer.status_code == 404:
            facts = [fact for fact in judge.facts if fact.session == name and fact.sure]
            assert judge.evicted or not facts, (name, facts)
        else:
            self.audit.check_session(answer.json(), name)
            for record in answer.json()["trajectories"]:
                self.experts[check_experts(judge, record) or "exact"] += 1


def _squeezed(text: str) -> str:
    return unicodedata.normalize("NFC", "".join(text.split()))


def _special(checkpoint: str) -> list[str]:
    vocabulary = orjson.loads(Path(checkpoint, "tokenizer.json").read_bytes())
    return [token["content"] for token in vocabulary["added_tokens"]]


def _abilities(tokenizer: Tokenizer) -> Abilities:
    """Return the abilities of ``tokenizer``, found once: to examine a real vocabulary takes 2 s."""
    hashable: Any = tokenizer  # by its identity, of which the protocol says nothing
    return _examined(hashable)


@lru_cache(maxsize=4)
def _examined(tokenizer: Any) -> Abilities:
    return Encoder(tokenizer).abilities


@asynccontextmanager
async def acting(
    tokenizer: Tokenizer, markup: Markup, world: World = CALM, *, seed: int = 0, retries: int = 0
) -> AsyncIterator[tuple[Adversary, str]]:
    """An adversary with ``tokenizer`` on a loopback port, and its address."""
    reader = Detokenizer(tokenizer, eos_ids(tokenizer), one_reading=not _abilities(tokenizer).lead)
    engine = Adversary(reader, Random(seed), markup.special, aborts=retries > 0 or seed % 2 > 0)
    engine.twins, engine.shapes = world.twins, world.shapes
    async with serving(engine.app) as worker:
        yield engine, worker


@asynccontextmanager
async def routed(
    worker: str, checkpoint: str, *flags: str, retries: int = 0, resume: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router with ``checkpoint`` in front of ``worker``."""
    arguments = ["--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--worker-urls", worker]
    arguments += ["--abort-retries", str(retries), "--abort-retry-wait-s", "0", *flags]
    arguments += ["--resume-aborted"] if resume else []
    _, app = build([*BARE, "--plugin", "control", *arguments])  # which tells of aborts
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
    ):
        yield client


def expert_flags(seed: int, *, is_cold: bool) -> list[str]:
    """Flags of the plugin r3 in the run with ``seed``: little memory in some, no shape in some, without it in some.

    ``is_cold``: there is a store, and memory never has room for all rows.
    """
    if seed % 7 == 3:
        return []
    limit = "600" if seed % 2 else "1" if is_cold else "0"
    shape = ["--r3-shape", *map(str, SHAPE)] if seed % 5 != 1 else []
    return ["--plugin", "r3", "--r3-max-bytes", limit, *shape]


def stage_of(
    engine: Adversary,
    client: httpx.AsyncClient,
    checkpoint: str,
    markup: Markup,
    world: World,
    *,
    resume: bool,
) -> Stage:
    """Return a stage for ``client`` and ``engine``."""
    spaces = bool(_abilities(engine.reader.tokenizer).guards)
    return Stage(client, engine, markup, _special(checkpoint), resume=resume, spaces=spaces, world=world)


@asynccontextmanager
async def staged(
    tokenizer: Tokenizer,
    checkpoint: str,
    markup: Markup,
    *flags: str,
    seed: int = 0,
) -> AsyncIterator[Stage]:
    """A router with ``checkpoint`` in front of an adversary with ``tokenizer``, both on loopback ports."""
    async with (
        acting(tokenizer, markup, seed=seed) as (engine, worker),
        routed(worker, checkpoint, *flags) as client,
    ):
        yield stage_of(engine, client, checkpoint, markup, CALM, resume=False)
