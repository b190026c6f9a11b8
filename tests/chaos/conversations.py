"""Agents that know nothing but text, and what each of them was told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

__all__ = ["Conversation", "Heard", "opening"]

_SYSTEM = "You are a careful assistant. Think before you answer, and keep to the facts that you were given."
_QUESTIONS = (
    "A train leaves at 9:40 and needs 95 minutes. When does it arrive? 🚂",
    "Write a function that turns a list of numbers into a histogram.",
    "Translate «good morning» into German, French and 日本語.",
    'Answer in JSON with the keys "city" and "country": where is the Eiffel Tower?',
    "Search for the weather in Oslo and tell me whether I need an umbrella. ☔",
)
_FOLLOW_UPS = (
    "Are you sure?",
    "Say it in other words.",
    "Und auf Deutsch? 電車",
    'Use the tool: {"q": 1}',
    "Go on.",
)


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer, or what came of it before it broke off (``whole`` is false then). Times are of the loop's clock.

    ``text`` is what the client keeps of it, which may be less than ``told``; it begins at ``place`` of the whole text.
    """

    rid: str
    told: str
    text: str
    output_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int | None
    reason: dict[str, Any] | None
    asked_at: float
    heard_at: float
    place: int = 0

    @property
    def whole(self) -> bool:
        """True when the engine finished it by itself, and the client saw that."""
        return self.reason is not None and self.reason["type"] != "abort"

    @property
    def kept_whole(self) -> bool:
        return self.reason is not None and self.text == self.told


@dataclass(slots=True)
class Conversation:
    """``heard`` are the answers that its text goes on from, in order, and ``settled`` the text up to the last of them.

    ``failed``: the turn after that was given up. ``said``: what the router said of the settled text.
    """

    session: str
    text: str
    random: Random
    heard: list[Heard] = field(default_factory=list)
    settled: str = ""
    asked: int = 0
    failed: bool = False
    said: dict[str, Any] | None = None

    def rid(self) -> str:
        """A name for the next request."""
        self.asked += 1
        return f"{self.session}.{self.asked}"

    def take(self, heard: Heard, shown: int | None = None) -> None:
        """Go on from an answer, or from its first ``shown`` characters."""
        kept = replace(heard, text=heard.told[:shown], place=len(self.text))
        self.heard.append(kept)
        self.text += kept.text
        self.settled = self.text

    def say(self) -> None:
        """The user speaks, written as a chat template writes it, or a tool answers."""
        if self.random.random() < 0.2:
            self.text += "\n<tool_response>42 °C</tool_response>\n"
            return
        said = self.random.choice(_FOLLOW_UPS)
        self.text += f"<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"

    def fork(self, session: str) -> Conversation:
        """The same so far, under another name."""
        return Conversation(session, self.text, Random(session), list(self.heard), self.settled)


def opening(seed: int) -> Iterator[Conversation]:
    """Conversations without end; eight in a row are a group with the same prompt, as GRPO has them."""
    number = 0
    while True:
        question = _QUESTIONS[number // 8 % len(_QUESTIONS)]
        text = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        text += "<|im_start|>assistant\n"
        session = f"c{number:05}"
        yield Conversation(session, text, Random(f"{seed} {session}"))
        number += 1
