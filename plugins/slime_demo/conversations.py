"""Conversations that the demo rolls out, as plain text."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FOLLOW_UPS", "PROMPTS", "SYSTEM", "Conversation", "conversations"]

SYSTEM = (
    "You are a careful assistant. Think before you answer, keep to the facts that you were given, "
    "and say so when something is missing."
)

PROMPTS = (
    "A train leaves at 9:40 and needs 95 minutes. When does it arrive?",
    "Write a function that turns a list of numbers into a histogram.",
    "Why is the sky darker on top of a mountain?",
    'Answer in JSON with the keys "city" and "country": where is the Eiffel Tower?',
    "Translate «good morning» into German, French and 日本語.",
    "Search for the weather in Oslo and tell me whether I need an umbrella. ☔",
    "What is 17 × 23? Show the steps.",
    "Summarise this in one line: the cache keeps the tokens, the text is only the key.",
)

FOLLOW_UPS = (
    "Are you sure? Check the second step.",
    "Thank you. Now say it in other words.",
)


@dataclass(slots=True)
class Conversation:
    """One sample, with its whole text so far.

    Each turn has its prompt in ``prompts``, and its request id, as in the engines' journals, in ``rids``.
    """

    session: str
    text: str
    streamed: bool
    rids: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def begin_turn(self) -> str:
        """Begin a turn, and return its request id."""
        rid = f"{self.session}.{len(self.rids) + 1}"
        self.rids.append(rid)
        self.prompts.append(self.text)
        return rid

    def add_answer(self, answer: str) -> None:
        """Append the engine's ``answer``."""
        self.text += answer

    def add_message(self, message: str) -> None:
        """Append the user's ``message`` as the chat template writes it."""
        self.text += f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def conversations(samples: int) -> list[Conversation]:
    """Return ``samples`` conversations for each prompt, as GRPO groups them. Every fourth is streamed."""
    return [
        Conversation(
            session=f"prompt{number}-sample{sample}",
            text=f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
            streamed=sample % 4 == 3,
        )
        for number, prompt in enumerate(PROMPTS, 1)
        for sample in range(samples)
    ]
