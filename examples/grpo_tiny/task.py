"""The toy task: in each turn the user asks for one kind of characters. An answer should have only these, and end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["CHARACTERS", "as_text", "reward", "scripts"]

#: By name, the characters that the user may ask for.
CHARACTERS = {"vowels": "aeiou", "digits": "0123456789"}
#: Answers with fewer characters get less than the whole reward.
_LEAST_CHARACTERS = 8


def scripts(turns: int) -> list[tuple[str, ...]]:
    """Return all conversations of ``turns`` turns: for each turn, the name of what the user asks for."""
    return list(itertools.product(sorted(CHARACTERS), repeat=turns))


def as_text(wanted: str, *, first: bool) -> str:
    """Return the text that the chat template writes before an answer.

    It is the end of the previous answer (unless ``first``), the user's message, and the header of the next answer.
    """
    ended = "" if first else "<|im_end|>\n"
    return f"{ended}<|im_start|>user\nWrite {wanted}.<|im_end|>\n<|im_start|>assistant\n"


def reward(script: Sequence[str], answers: Sequence[str], ended: Sequence[bool]) -> float:
    """Return the mean over the turns of the share of wanted characters, between 0 and 1.

    Short answers get less (``_LEAST_CHARACTERS``). ``ended``: True if the model ended the answer itself. An answer that
    reached the length limit counts half.
    """
    shares = [
        sum(character in CHARACTERS[wanted] for character in answer)
        / max(len(answer), _LEAST_CHARACTERS)
        * (1.0 if is_ended else 0.5)
        for wanted, answer, is_ended in zip(script, answers, ended, strict=True)
    ]
    return sum(shares) / len(shares)
