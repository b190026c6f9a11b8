"""Conversations by number, the same in every run. Each is generated when it is needed, so none is kept in memory.

Their text is prose that is cut where tokens end. So the ids of the text are known without tokenising 200 million
tokens.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.first_generation import Trie
from benchmarks.samples import Samples
from slime_radix_cache.capture.replies import pack_logprobs
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Context
from slime_radix_cache.index.trajectories import Trajectories

__all__ = [
    "END",
    "LONG",
    "SHORT",
    "TALK",
    "Histories",
    "Shape",
    "Turn",
    "record",
    "record_first_generation",
    "text_of",
]

#: The text of the token that ends an answer. Engines do not show it; the template of the next turn writes it.
END = "<|im_end|>"

_FINISHED = '{"type":"stop","matched":2}'
_PROSE_TOKENS = 40_000
_LOGPROBS = 100_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of prose in the first prompt, in each further prompt, and in each answer; and the number of answers."""

    opening: int
    question: int
    answer: int
    turns: int


#: Five turns. With the question of a sixth turn, they make a text of 8.9 kB: six prompts and five answers.
TALK = Shape(opening=269, question=28, answer=258, turns=5)
#: 2,000 tokens in five turns.
LONG = Shape(opening=310, question=28, answer=307, turns=5)
#: A prompt of about 30 tokens with the template's markup, and an answer of 64.
SHORT = Shape(opening=14, question=14, answer=63, turns=1)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer. ``ids``: the sampled ids with the end token. ``answer``: their text without it."""

    prompt: str
    prompt_ids: array[int]
    answer: str
    ids: array[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Prose:
    """Text, its ids, and the place in the text where each token begins."""

    tokenizer: Tokenizer
    text: str
    ids: array[int]
    places: Sequence[int]


@lru_cache
def _prose(path: Path) -> _Prose:
    """Return prose and its ids, by the tokenizer at ``path``. A process computes them once."""
    tokenizer = Tokenizer.from_file(str(path))
    text = Samples(tokenizer).words(_PROSE_TOKENS)
    encoded = tokenizer.encode(text)
    return _Prose(tokenizer, text, array("i", encoded.ids), [start for start, _ in encoded.offsets])


class Histories:
    """Conversations of one shape, in the tokens of the ``tokenizer.json`` at ``path``.

    With ``float32`` the logprobs are float32 values, as engines compute them, and the radix cache keeps each in four
    bytes. Otherwise the cache needs eight bytes for each.
    """

    def __init__(self, path: Path, shape: Shape, *, float32: bool = True) -> None:
        self._shape = shape
        self._prose = _prose(path)
        tokenizer = self._prose.tokenizer

        def fixed(text: str) -> tuple[str, array[int]]:
            return text, array("i", tokenizer.encode(text).ids)

        self._end = fixed(END)
        self._user = fixed("<|im_start|>user\n")
        self._assistant = fixed(f"{END}\n<|im_start|>assistant\n")
        self._line_break = fixed("\n")
        self._digits = {digit: fixed(digit) for digit in "0123456789"}
        drawn = -np.random.default_rng(1).exponential(0.5, _LOGPROBS)
        self._logprobs = array("d", drawn.astype(np.float32 if float32 else np.float64).astype(np.float64))

    def turns(self, number: int) -> list[Turn]:
        """Return conversation ``number``. Its first prompt contains the number, so no two conversations are equal."""
        drawn = random.Random(number)
        turns = []
        for index in range(self._shape.turns):
            prompt, prompt_ids = self._prompt(number, index, drawn)
            answer, ids = self._piece(self._shape.answer, drawn)
            start = drawn.randrange(_LOGPROBS - len(ids) - 1)
            logprobs = self._logprobs[start : start + len(ids) + 1]
            turns.append(Turn(prompt, prompt_ids, answer, ids + self._end[1], logprobs))
        return turns

    def question(self, number: int) -> str:
        """Return the text that a client adds after all turns of conversation ``number``, to ask the next question."""
        return self._prompt(number, self._shape.turns, random.Random(-number - 1))[0]

    def _prompt(self, number: int, index: int, drawn: random.Random) -> tuple[str, array[int]]:
        if index:
            asked = [self._piece(self._shape.question, drawn)]
            before = self._line_break
        else:
            asked = [self._piece(self._shape.opening, drawn), *(self._digits[digit] for digit in str(number))]
            before = "", array("i")
        parts = [before, self._user, *asked, self._assistant]
        ids = array("i")
        for _, some in parts:
            ids += some
        return "".join([text for text, _ in parts]), ids

    def _piece(self, tokens: int, drawn: random.Random) -> tuple[str, array[int]]:
        prose = self._prose
        start = drawn.randrange(len(prose.places) - tokens)
        end = start + tokens
        return prose.text[prose.places[start] : prose.places[end]], prose.ids[start:end]


def text_of(turns: Sequence[Turn]) -> str:
    """Return the text of the whole conversation, as a client writes it."""
    return "".join([f"{turn.prompt}{turn.answer}{END}" for turn in turns])


def record(kept: Trajectories, turns: Sequence[Turn], session: str | None = None) -> None:
    """Record the conversation in ``kept``, as the plugin ``radix_cache`` does."""
    context: Context = None
    text = ""
    for turn in turns:
        text += turn.prompt
        sampled = Sampled(
            turn.ids.tobytes(),
            pack_logprobs(turn.logprobs),
            turn.answer,
            len(turn.ids) - 1,
            END,
            (("default", len(turn.ids)),),
            _FINISHED,
        )
        kept.pin(context)
        # Each request has a string of its own for the same session, as in a router.
        whose = "".join(session) if session is not None else None
        response = kept.record(context, turn.prompt_ids.tobytes(), text.encode(), sampled, whose)
        kept.unpin(context)
        context = response, len(response)
        text += turn.answer + END


def record_first_generation(trie: Trie, turns: Sequence[Turn]) -> None:
    """Record the conversation in ``trie``, in lists as they come out of JSON: each number is an object."""
    node = trie.root
    for turn in turns:
        asked = turn.prompt_ids.tolist()
        node = trie.add(node, turn.prompt, asked, [0.0] * len(asked), [0] * len(asked))
        sampled = turn.ids.tolist()
        node = trie.add(node, turn.answer + END, sampled, list(turn.logprobs), [1] * len(sampled))
