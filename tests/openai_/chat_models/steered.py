"""A language model that says what a test wants, in tokens that nobody would have chosen; and an engine that runs it.

The engine is the embedded one, so all of SGLang's protocol is there: streams of both kinds, logprobs, batches, stop
strings, aborts, and the journal. Only the logits are bent. The sampling stays true: each token is drawn, and told with
its real log-probability, so two answers to one prompt read alike and are spelt differently.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from openai_.chat_models.families import Family
from slime_engine.app import make_app
from slime_engine.engine import EngineHost
from slime_engine.journal import JournalEntry
from slime_engine.language import FloatArray, LanguageModel, ModelTokenizer
from slime_engine.settings import Settings
from slime_http.serving import serving

__all__ = [
    "Answer",
    "Noise",
    "Script",
    "Steered",
    "SteeredModel",
    "by_text",
    "in_turn",
    "speaking",
    "steered",
]

#: A text, in which special tokens written out are those tokens; or the very ids.
Answer = str | tuple[int, ...]
#: Texts that may be said behind these tokens; with nothing to choose from, the model says what it likes.
Script = Callable[[list[int]], Sequence[Answer]]

#: Added to the logits of what may come next: no temperature and no penalty makes up for it.
_CERTAIN = 1000.0
#: Weight of the model's own likes among spellings; with 1 it would spell as it has learnt to.
_LIKES = 0.1

_Rest = bytes | tuple[int, ...]


def by_text(tokenizer: ModelTokenizer, reply: Callable[[str], Sequence[Answer]]) -> Script:
    """A script that reads what stands before as text, special tokens spelt out."""
    return lambda ids: reply(tokenizer.decode(ids, skip_special_tokens=False))


def in_turn(*answers: Answer) -> Script:
    """A script for one conversation: to each new prompt the next answer."""
    left = list(answers)

    def script(ids: list[int]) -> Sequence[Answer]:
        assert left, f"{len(answers)} answers, and one more prompt of {len(ids)} tokens"
        return [left.pop(0)]

    return script


class Noise:
    """A model that has learnt nothing: the last token and the version fix its logits."""

    obeys: frozenset[str] = frozenset()

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer.token_bytes)

    def next_logits(self, context: Sequence[int], version: str, end: int | None = None) -> FloatArray:
        seed = [zlib.crc32(version.encode()), *context[:end][-1:]]
        return np.random.default_rng(seed).normal(size=self.vocab_size)


class _Spellings:
    """All tokens with which a text may go on, however unlikely."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._plain: dict[bytes, list[int]] = defaultdict(list)
        self._special: dict[bytes, int] = {}
        for token_id, text in enumerate(tokenizer.token_bytes):
            if token_id in tokenizer.special_ids:
                self._special[text] = token_id
            elif text:
                self._plain[text].append(token_id)
        self._marks = re.compile(b"|".join(map(re.escape, self._special)))
        self._longest = max(map(len, self._plain))

    def first(self, text: bytes) -> list[int]:
        """Tokens that spell a beginning of ``text``; a special token's text is that token, never spelt in others."""
        mark = self._marks.search(text)
        if mark is not None and mark.start() == 0:
            return [self._special[mark[0]]]
        until = len(text) if mark is None else mark.start()
        sizes = range(1, min(until, self._longest) + 1)
        return [token_id for size in sizes for token_id in self._plain.get(text[:size], ())]


class SteeredModel:
    """``base``, but it says what ``script`` wants, and then ``end``, the token that ends an answer.

    A script is asked once for each context that is no answer under way: the same prompt again has the same answers
    (``asked`` are the contexts), and a prompt that ends with a beginning of an answer, token for token, goes on with
    it. Contexts that are only scored ask nothing. One event loop needs no lock.
    """

    #: Whoever asks for a schema has a script that keeps to it.
    obeys = frozenset(("json_schema", "regex", "ebnf", "structural_tag"))

    def __init__(self, base: LanguageModel, script: Script, end: str) -> None:
        self.tokenizer = base.tokenizer
        self.vocab_size = base.vocab_size
        self.asked: list[list[int]] = []
        self._base = base
        self._script = script
        (self._end,) = base.tokenizer.encode(end)
        self._spellings = _Spellings(base.tokenizer)
        self._rests: dict[bytes, list[_Rest]] = {}

    def next_logits(self, context: Sequence[int], version: str, end: int | None = None) -> FloatArray:
        logits = self._base.next_logits(context, version, end)
        scored = end is not None
        allowed = [
            token_id
            for rest in self._rests_behind(list(context[:end]), scored)
            for token_id in self._first(rest)
        ]
        logits[allowed] = logits[allowed] * _LIKES + _CERTAIN
        return logits

    def _first(self, rest: _Rest) -> Sequence[int]:
        if not rest:
            return [self._end]
        return self._spellings.first(rest) if isinstance(rest, bytes) else rest[:1]

    def _rests_behind(self, ids: list[int], scored: bool) -> list[_Rest]:
        """Return the rests of the answers that ``ids`` end within."""
        key = _digest(ids)
        if key not in self._rests:
            rests = [
                _behind(rest, ids[-1], self.tokenizer) for rest in self._rests.get(_digest(ids[:-1]), ())
            ]
            begun = [rest for rest in rests if rest is not None]
            if scored and not begun:
                return []
            self._rests[key] = begun or self._ask(ids)
        return self._rests[key]

    def _ask(self, ids: list[int]) -> list[_Rest]:
        self.asked.append(ids)
        return [answer.encode() if isinstance(answer, str) else answer for answer in self._script(ids)]


def _behind(rest: _Rest, token_id: int, tokenizer: ModelTokenizer) -> _Rest | None:
    """Return the rest of ``rest`` after the token; None when it begins with another token."""
    if isinstance(rest, bytes):
        said = tokenizer.token_bytes[token_id]
        return rest[len(said) :] if said and rest.startswith(said) else None
    return rest[1:] if rest[:1] == (token_id,) else None


def _digest(ids: list[int]) -> bytes:
    return blake2b(np.array(ids, np.int32).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Steered:
    """An engine that serves at ``url``; its journal is read where it is written, not through its HTTP."""

    url: str
    host: EngineHost

    @property
    def checkpoint(self) -> str:
        """The directory of its tokenizer and chat template, for ``--hf-checkpoint``; gone with the engine."""
        return str(self.host.engine.tokenizer_dir)

    def journal(self, rid: str | None = None) -> list[JournalEntry]:
        """Return the journal of what it consumed and sampled, in the order in which the requests came."""
        return list(self.host.engine.journal.entries(rid))


@asynccontextmanager
async def steered(model: LanguageModel, **settings: Any) -> AsyncIterator[Steered]:
    """An engine on a port of its own; ``settings`` are the engine's, with a ``seed`` it samples the same each time."""
    app = make_app(Settings(**settings), lambda: model)
    async with serving(app, grace_s=1) as url:
        yield Steered(url, app.state.host)


@asynccontextmanager
async def speaking(family: Family, script: Script, **settings: Any) -> AsyncIterator[Steered]:
    """An engine with a model of this family."""
    model = SteeredModel(Noise(family.tokenizer), script, family.eos)
    async with steered(model, **{"model_name": family.name, **settings}) as engine:
        yield engine
