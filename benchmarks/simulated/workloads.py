"""Workloads of the simulation: the requests of clients, and the times between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulated.prompts import Text

__all__ = ["PAUSED", "TINY", "WORKLOADS", "Turn", "Workload", "conversation", "length", "three_turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a client, for ``new_tokens`` tokens.

    ``prompt``: the whole prompt; None: the conversation so far and ``added`` tokens. ``think_s``: seconds from the
    previous answer to this request.
    """

    prompt: Text | None
    added: int
    new_tokens: int
    think_s: float = 0.0


Conversation = list[Turn]


@dataclass(frozen=True, slots=True)
class Workload:
    """``steps`` steps of conversations: a step begins when the previous step has ended.

    ``make(random)`` returns the conversations of a step; ``concurrent`` of them run at once. ``has_sessions``: each
    request names its conversation. Half of the engines join at ``joined_s`` seconds; 0: no engine joins later.
    """

    name: str
    concurrent: int
    steps: int
    make: Callable[[random.Random], list[Conversation]]
    has_sessions: bool = False
    joined_s: float = 0.0


def length(rng: random.Random, median: int, spread: float = 0.6) -> int:
    """Return a number of tokens, log-normally distributed. By default, the mean is 1.2 times ``median``."""
    return max(4, min(16 * median, round(rng.lognormvariate(0, spread) * median)))


def conversation(rng: random.Random, prompt: Text, answer: int, added: int) -> Conversation:
    """Return four to eight turns.

    ``answer``: the median number of tokens of an answer. ``added``: the median number of tokens that a later turn adds.
    """
    later = [
        Turn(None, length(rng, added), length(rng, answer), rng.expovariate(2))
        for _ in range(rng.randint(3, 7))
    ]
    return [Turn(prompt, 0, length(rng, answer)), *later]


def three_turns(rng: random.Random, prompts: int, answer: int = 150) -> list[Conversation]:
    """Return conversations of three turns, in random order. Eight conversations begin with each long prompt."""
    made = [
        [
            Turn(shared.then(length(rng, 300)), 0, length(rng, answer)),
            *(Turn(None, length(rng, 300), length(rng, answer)) for _ in range(2)),
        ]
        for shared in [Text().then(4000) for _ in range(prompts)]
        for _ in range(8)
    ]
    rng.shuffle(made)
    return made


def _multi_turn(rng: random.Random) -> list[Conversation]:
    return [conversation(rng, Text().then(length(rng, 400)), 150, 120) for _ in range(800)]


def _agents(rng: random.Random, count: int = 640) -> list[Conversation]:
    system = Text().then(8400)
    return [conversation(rng, system.then(length(rng, 200)), 120, 200) for _ in range(count)]


def _fewer_agents(rng: random.Random) -> list[Conversation]:
    return _agents(rng, 240)


def _questions(rng: random.Random) -> list[Conversation]:
    system = Text().then(6000)
    return [[Turn(system.then(length(rng, 40)), 0, length(rng, 100))] for _ in range(1600)]


def _grpo(rng: random.Random) -> list[Conversation]:
    prompts = [Text().then(length(rng, 1000)) for _ in range(64)]
    return [
        [Turn(prompt, 0, 2000 if rng.random() < 0.03 else length(rng, 300, 0.5))]
        for prompt in prompts
        for _ in range(8)
    ]


def _grpo_hard(rng: random.Random) -> list[Conversation]:
    """Return 32 groups of samples. Three groups have long answers, since their prompts are hard."""
    hard = rng.sample(range(32), 3)
    made = []
    for group in range(32):
        prompt = Text().then(length(rng, 1000))
        answer, spread = (3000, 0.2) if group in hard else (300, 0.5)
        made += [[Turn(prompt, 0, length(rng, answer, spread))] for _ in range(16)]
    return made


def _grpo_tools(rng: random.Random) -> list[Conversation]:
    system = Text().then(1500)
    made = []
    for _ in range(32):
        prompt = system.then(length(rng, 500))
        for _ in range(8):
            calls = min(20, int(rng.expovariate(1 / 4)))
            later = [
                Turn(None, length(rng, 150), length(rng, 150), rng.expovariate(1 / 0.3)) for _ in range(calls)
            ]
            made.append([Turn(prompt, 0, length(rng, 150)), *later])
    return made


def _unrelated(rng: random.Random) -> list[Conversation]:
    return [[Turn(Text().then(length(rng, 1500, 1.0)), 0, length(rng, 150, 0.8))] for _ in range(1200)]


def _skewed(rng: random.Random) -> list[Conversation]:
    """Return conversations. One in twelve, drawn at random, goes on with long documents and long answers."""
    made = []
    for _ in range(600):
        turns = conversation(rng, Text().then(length(rng, 400)), 150, 120)
        if rng.random() < 1 / 12:
            turns += [Turn(None, length(rng, 6000), length(rng, 600)) for _ in range(12)]
        made.append(turns)
    return made


def _long_agents(rng: random.Random) -> list[Conversation]:
    """Return conversations of 24 turns, all of which begin at once."""
    system = Text().then(2000)
    return [
        [
            Turn(system.then(length(rng, 200)), 0, length(rng, 120)),
            *(Turn(None, length(rng, 150), length(rng, 120), rng.expovariate(2)) for _ in range(23)),
        ]
        for _ in range(128)
    ]


def _paused(tokens: int, pause_s: float, count: int) -> Callable[[random.Random], list[Conversation]]:
    """Return a function that makes conversations with long prompts of their own and long pauses between turns."""

    def make(rng: random.Random) -> list[Conversation]:
        made = []
        for _ in range(count):
            later = [
                Turn(None, length(rng, 200), length(rng, 150), rng.expovariate(1 / pause_s))
                for _ in range(rng.randint(3, 7))
            ]
            made.append([Turn(Text().then(length(rng, tokens)), 0, length(rng, 150)), *later])
        return made

    return make


def _few(rng: random.Random) -> list[Conversation]:
    """Return a few conversations with one system prompt."""
    system = Text().then(400)
    return [conversation(rng, system.then(length(rng, 100)), 20, 50) for _ in range(6)]


WORKLOADS = (
    Workload("multi-turn, 128", 128, 1, _multi_turn),
    Workload("multi-turn with sessions, 128", 128, 1, _multi_turn, has_sessions=True),
    Workload("agents, 8,400-token system prompt, 128", 128, 1, _agents),
    Workload("agents, 8,400-token system prompt, 40", 40, 1, _fewer_agents),
    Workload("agents with sessions, 128", 128, 1, _agents, has_sessions=True),
    Workload("6,000-token system prompt, questions, 48", 48, 1, _questions),
    Workload("GRPO 64 x 8, 256, stragglers", 256, 3, _grpo),
    Workload("GRPO with a few hard prompts, 256", 256, 3, _grpo_hard),
    Workload("GRPO 32 x 8 with tools, 256", 256, 2, _grpo_tools),
    Workload("sessions, a few of them heavy, 128", 128, 1, _skewed, has_sessions=True),
    Workload(
        "sessions of 24 turns, half of the engines join after 10 s, 128", 128, 1, _long_agents, True, 10.0
    ),
    Workload("unrelated prompts, 96", 96, 1, _unrelated),
)

#: Conversations with pauses so long that small caches evict them meanwhile. Only ``scheduling_caches`` has these.
PAUSED = (
    Workload("4,000-token prompts, pauses of 10 s, 128", 128, 1, _paused(4000, 10, 300)),
    Workload("8,000-token prompts, pauses of 20 s, 100", 100, 1, _paused(8000, 20, 200)),
)

#: Workloads of a tiny run.
TINY = (
    Workload("few conversations, 4", 4, 2, _few),
    Workload("few sessions, half of the engines join after 1 s, 4", 4, 1, _few, True, 1.0),
)
