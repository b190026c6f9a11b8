"""Random conversations against an adversarial engine's journal: equal to it, or said not to be.

The suite plays some hundred conversations. To play at least 20,000 and to see what came of them::

    SLIME_ROUTER_CONVERSATIONS=20000 pytest -s tests/radix_cache/machine/test_machine.py
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from own_time import OWN_TIME
from radix_cache.machine.rollouts import BORROWS, CHATML, Conversation, acting, expert_flags, routed, stage_of
from radix_cache.machine.worlds import WORLDS, World
from slime_engine.tokenizer import EngineTokenizer

_CONVERSATIONS = int(os.environ.get("SLIME_ROUTER_CONVERSATIONS", "100"))
_STEPS = 14 if _CONVERSATIONS == 100 else 20
#: Conversations of one router.
_AT_ONCE = 15
_SETTINGS = settings(
    max_examples=3,
    stateful_step_count=_STEPS,
    deadline=None,
    database=None,
    # The same conversations in each run of the suite; a long one plays others.
    derandomize=_CONVERSATIONS == 100,
    phases=(Phase.generate,),  # steps are drawn by seeds, so there is nothing to shrink
    suppress_health_check=list(HealthCheck),
)
SEEDS = st.integers(0, 2**32 - 1)


def _tiers(seed: int, directory: Path) -> list[str]:
    """Return flags of the store in the run with ``seed``: a remote tier, an SSD, both, or neither.

    Memory has room for few records if there is another tier, and an SSD if there is a remote tier.
    """
    has_remote, has_ssd = seed % 9 in {3, 5, 8}, seed % 9 in {3, 6, 8}
    flags = ["--store-memory-bytes", str(64 << 10)] if has_remote or has_ssd else []
    if has_ssd:
        size = (256 << 10) if has_remote else (16 << 20)
        flags += ["--store-ssd", str(directory / "ssd"), "--store-ssd-bytes", str(size)]
    if has_remote:
        remote = directory / "remote"
        remote.mkdir()
        flags += ["--store-remote", f"file://{remote}"]
    return flags


class RolloutMachine(RuleBasedStateMachine):
    """Routers' lives in one ``world``. What is declared here is given by the test; the counts are its."""

    portal: BlockingPortal
    tokenizer: EngineTokenizer
    checkpoint: str
    world: World
    outcomes: Counter[str]
    experts: Counter[str]
    counts: Counter[str]
    is_cold: bool = False

    @initialize(
        tokens=st.sampled_from([0, 0, 0, 0, 0, 300, 800]),
        size_bytes=st.sampled_from([0, 0, 0, 0, 0, 0, 300, 20_000]),
        versions=st.sampled_from([0, 0, 0, 0, 3]),
        aborts=st.sampled_from(["passed on", "tried again", "resumed", "resumed"]),
        incremental=st.booleans(),
        named=st.booleans(),
        is_logged=st.booleans(),
        seed=SEEDS,
    )
    def start(
        self,
        tokens: int,
        size_bytes: int,
        versions: int,
        aborts: str,
        incremental: bool,
        named: bool,
        is_logged: bool,
        seed: int,
    ) -> None:
        self.flags = ["--radix-tree-max-size", str(tokens), "--radix-tree-max-bytes", str(size_bytes)]
        self.flags += ["--gc-threshold-k", str(versions)]
        self.directory = TemporaryDirectory() if is_logged and not self.is_cold else None
        if self.directory is not None:
            self.flags += ["--trajectory-log", self.directory.name]
        self.disk = TemporaryDirectory() if self.is_cold and seed % 3 != 1 else None
        if self.is_cold:  # memory has room for nothing, for little, or for most
            few = ("1", "1", "100", "400")[seed % 4]
            self.flags += ["--radix-tree-max-size", few, "--middleware-paths"]
            self.flags += ["radix_cache.shelf"] if self.disk is None else ["slime_tiered_store"]
        if self.disk is not None:
            self.flags += _tiers(seed, Path(self.disk.name))
        self.flags += expert_flags(seed, is_cold=self.is_cold)
        self.retries, self.resume = (0 if aborts == "passed on" else 2), aborts == "resumed"
        acted = acting(self.tokenizer, CHATML, self.world, seed=seed, retries=self.retries)
        self.acted = self.portal.wrap_async_context_manager(acted)
        engine, self.worker = self.acted.__enter__()
        client = self._begin()
        self.stage = stage_of(engine, client, self.checkpoint, CHATML, self.world, resume=self.resume)
        self.stage.engine.incremental = incremental
        if named:
            self.stage.engine.names = "step-{}".format
        self.counts[aborts] += 1

    def _begin(self) -> httpx.AsyncClient:
        """A router's life."""
        life = routed(self.worker, self.checkpoint, *self.flags, retries=self.retries, resume=self.resume)
        self.running: AbstractContextManager[httpx.AsyncClient] = self.portal.wrap_async_context_manager(life)
        return self.running.__enter__()

    @precondition(lambda self: self.directory is not None and self.stage.conversations)
    @rule()
    def restart(self) -> None:
        """Another router with the same log knows the same facts and the same losses."""
        self.portal.call(self.stage.settle, [])
        self.running.__exit__(None, None, None)
        self.stage.client = self._begin()
        self.stage.judge.restart()
        self.counts["restarts"] += 1

    @precondition(lambda self: len(self.stage.conversations) < _AT_ONCE)
    @rule(
        size=st.integers(1, 5),
        sessions=st.sampled_from(["own", "own", "none"]),
        turns=st.integers(0, 3),
        seed=SEEDS,
    )
    def begin_a_group(self, size: int, sessions: str, turns: int, seed: int) -> None:
        """GRPO: the same prompt some times over, at once; or a batch of prompts without sessions."""
        random = Random(seed)
        name = "" if sessions == "own" else None
        prompt = random.choice((CHATML.system, "")) + self.stage.asked(random)
        group = [self.stage.begin(prompt + (str(one) if name is None else ""), name) for one in range(size)]
        self.portal.call(self.stage.all_turn, group, random)
        self._go_on(turns, random)

    def _some(self, random: Random) -> list[Conversation]:
        known = self.stage.conversations
        return random.sample(known, random.randint(1, min(len(known), 8)))

    @precondition(lambda self: self.stage.conversations)
    @rule(turns=st.integers(1, 4), seed=SEEDS)
    def go_on(self, turns: int, seed: int) -> None:
        self._go_on(turns, Random(seed))

    def _go_on(self, turns: int, random: Random) -> None:
        for _ in range(turns):
            some = self._some(random)
            for conversation in some:
                self.portal.call(self.stage.go_on, conversation, random)
            self.portal.call(self.stage.all_turn, some, random)

    @precondition(lambda self: 0 < len(self.stage.conversations) < _AT_ONCE)
    @rule(seed=SEEDS)
    def fork(self, seed: int) -> None:
        """A new session goes on where another one was."""
        random = Random(seed)
        forks = []
        for origin in self._some(random):
            text = (
                origin.text[: random.randint(1, len(origin.text))] if random.random() < 0.5 else origin.text
            )
            forks.append(self.stage.begin(text + self.stage.asked(random)))
        self.portal.call(self.stage.all_turn, forks, random)

    @precondition(lambda self: 0 < len(self.stage.conversations) < _AT_ONCE)
    @rule(turns=st.integers(1, 3), seed=SEEDS)
    def shadow(self, turns: int, seed: int) -> None:
        """Another session is asked the same as a conversation, turn by turn, before it or after it."""
        random = Random(seed)
        origin = random.choice(self.stage.conversations)
        other = self.stage.begin(
            origin.text, random.choice(("", random.choice(self.stage.conversations).name))
        )
        for _ in range(turns):
            self.portal.call(self.stage.go_on, origin, random)
            other.text, other.given = origin.text, None
            both = [origin, other]
            random.shuffle(both)
            for one in both:
                self.portal.call(self.stage.all_turn, [one], random)

    @precondition(lambda self: len(self.stage.conversations) < _AT_ONCE)
    @rule(size=st.integers(1, 3), seed=SEEDS)
    def poach_at_once(self, size: int, seed: int) -> None:
        """A session writes what others were answered while it waits for its own answer."""
        random = Random(seed)
        prompt = self.stage.asked(random)
        for _ in range(size):
            self.portal.call(self.stage.calm_turn, self.stage.begin(prompt), random)
        own = self.stage.begin(prompt)
        self.portal.call(partial(self.stage.overlap, own, random, borrows=True))
        self.portal.call(self.stage.read, own.text, own.name)

    @precondition(lambda self: len(self.stage.conversations) < _AT_ONCE)
    @rule(size=st.integers(2, 3), calls=st.sampled_from([0, 17, 17, 41]), seed=SEEDS)
    def poach(self, size: int, calls: int, seed: int) -> None:
        """Sessions are answered the same, or nearly, and write each other's answers, some calls later."""
        random = Random(seed)
        prompt = self.stage.asked(random)
        group = [self.stage.begin(prompt) for _ in range(size)]
        for one in group:
            self.portal.call(self.stage.calm_turn, one, random)
        self.portal.call(self.stage.talk, str(group[0].name), calls, random)
        for one in group:
            self.portal.call(self.stage.go_on, one, random, BORROWS)
            self.portal.call(self.stage.all_turn, [one], random)
            self.portal.call(self.stage.read, one.text, one.name)
        self.portal.call(self.stage.judge_session, str(group[0].name))
        self.counts["poached"] += 1

    @precondition(lambda self: self.stage.conversations)
    @rule(seed=SEEDS)
    def overlap(self, seed: int) -> None:
        """A session asks while it is being answered."""
        random = Random(seed)
        self.portal.call(self.stage.settle, [])
        one = random.choice(self.stage.conversations)
        if one.name is not None and not one.failed:
            self.portal.call(self.stage.go_on, one, random)
            if one.given is None:
                self.portal.call(self.stage.overlap, one, random)

    @rule()
    def update_weights(self) -> None:
        engine = self.stage.engine
        engine.version += 1
        announced = {"weight_version": engine.names(engine.version)}
        self.portal.call(lambda: self.stage.client.post("/weight_version", json=announced))

    @precondition(lambda self: self.stage.conversations)
    @rule(seed=SEEDS)
    def read(self, seed: int) -> None:
        """Any beginning of what was said, in anybody's name."""
        random = Random(seed)
        self.portal.call(self.stage.settle, [])
        for conversation in self._some(random):
            size = len(conversation.text)
            text = conversation.text[: random.choice((size, random.randint(1, size)))]
            text += random.choice(("", "", "", "<|im_end|>", "q"))
            session = random.choice(self.stage.conversations).name
            body = random.random() < 0.5
            self.portal.call(partial(self.stage.read, text, session, body=body))
            self.counts["reads"] += 1
            if session is not None and random.random() < 0.2:
                self.portal.call(self.stage.judge_session, session)

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        try:
            self.portal.call(self.stage.judge_all)
            if self.is_cold:
                self._check_nothing_is_lost()
            self.outcomes.update(self.stage.outcomes)
            self.experts.update(self.stage.experts)
            self.counts.update(self.stage.shapes)
            self.counts.update(conversations=len(self.stage.conversations), turns=self.stage.turns)
        finally:
            self.running.__exit__(None, None, None)
            self.acted.__exit__(None, None, None)
            for directory in (self.directory, self.disk):
                if directory is not None:
                    directory.cleanup()

    def _check_nothing_is_lost(self) -> None:
        stats = self.portal.call(self.stage.look)
        assert not stats["evictions"], stats
        assert not stats["demoted"]["failures"], stats
        assert not {"dropped", "not_kept", "not_in_store"} & self.stage.experts.keys()
        assert "r3" not in self.flags or not self.stage.experts["not_recorded"], self.stage.experts
        self.counts["demoted"] += sum(stats["demoted"]["demotions"].values())
        self.counts["promoted"] += stats["demoted"]["promotions"]
        if self.disk is not None:
            tiers = self.portal.call(self.stage.client.get, "/store").json()["tiers"]
            self.counts.update({f"promoted from {name}": tier["promotions"] for name, tier in tiers.items()})


@pytest.mark.timeout(0 if _CONVERSATIONS > 1000 else 600)  # it computes all the time; turns have a time limit
@pytest.mark.parametrize("world", WORLDS)
def test_every_conversation_is_the_journals_or_says_why_not(
    tokenizer: EngineTokenizer, checkpoint: str, world: str
) -> None:
    outcomes, experts, counts = _played(tokenizer, checkpoint, WORLDS[world])
    print(world, dict(counts), dict(outcomes), dict(experts))  # noqa: T201  # the figures of a long run
    assert outcomes["exact"] > (counts["conversations"] - outcomes["evicted"]) / 5
    assert experts["exact"] > (experts.total() - experts["evicted"]) / 20


@pytest.mark.timeout(0 if _CONVERSATIONS > 1000 else 600)
@pytest.mark.parametrize("world", WORLDS if _CONVERSATIONS > 1000 else ["all"])
def test_demoted_conversations_are_as_exact_as_others(
    tokenizer: EngineTokenizer, checkpoint: str, world: str
) -> None:
    outcomes, experts, counts = _played(tokenizer, checkpoint, WORLDS[world], is_cold=True)
    print(world, dict(counts), dict(outcomes), dict(experts))  # noqa: T201  # the figures of a long run
    assert counts["demoted"] > counts["turns"]
    assert counts["promoted"] > counts["turns"]
    if _CONVERSATIONS == 100:  # other runs have random seeds, and a short one may have no such tier
        assert counts["promoted from ssd"] > 0, "choose the tiers of _tiers by other remainders of the seed"
        assert counts["promoted from remote"] > 0, (
            "choose the tiers of _tiers by other remainders of the seed"
        )
    assert outcomes["exact"] > counts["conversations"] / 5
    assert experts["exact"] > experts.total() / 20


def _played(
    tokenizer: EngineTokenizer, checkpoint: str, world: World, *, is_cold: bool = False
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    outcomes, experts, counts = Counter[str](), Counter[str](), Counter[str]()
    with start_blocking_portal(*OWN_TIME) as portal:
        given = {"portal": portal, "tokenizer": tokenizer, "checkpoint": checkpoint, "world": world}
        given |= {"outcomes": outcomes, "experts": experts, "counts": counts, "is_cold": is_cold}
        machine = type("Given", (RolloutMachine,), given)
        while counts["conversations"] < _CONVERSATIONS / len(WORLDS):
            run_state_machine_as_test(machine, settings=_SETTINGS)
    return outcomes, experts, counts
