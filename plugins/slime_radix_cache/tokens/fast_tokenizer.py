"""A faster tokenizer of the same vocabulary, used as long as it makes the same ids.

``fastokens`` reads a ``tokenizer.json`` like the ``tokenizers`` library, and encodes ten times as fast. The ids of both
are compared on many kinds of texts when the vocabulary is loaded, and then in every 101st call.
"""

from __future__ import annotations

import importlib
import logging
import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

from slime_radix_cache.tokens.backend import VOCABULARIES

__all__ = ["Batch", "ComparedTokenizer", "fast_copy", "reference_of"]

logger = logging.getLogger(__name__)

#: Returns the ids of several texts. Arguments: the texts; True to add BOS and the like.
Batch = Callable[[Sequence[str], bool], list[Sequence[int]]]

#: One call in so many is compared. A comparison of 200 characters takes 100 us, so this costs 1 us a call on average.
_COMPARED_EVERY = 101
#: How many characters at the beginning of a text are compared: the slower tokenizer takes 3 ms for them.
_COMPARED_CHARACTERS = 1 << 12
#: A lone text of fewer characters is encoded without the tokenizer's own threads, which cost more than they save.
_SHORT = 1 << 12

_TOGETHER = 64
_RUN = 600
_FRAMED_EVERY = 50
_SPACES = (" ", "\n", "\t", "\r\n", "\r", "\x0b", "\u00a0", "\u2003", "\u2028", "\u3000", "\u200b")
_WORDS = (
    "Hello",
    " world",
    "it's",
    "I'LL",
    "x1y22",
    "3.14159",
    "naïve",
    " (a+b)==c;",
    "日本語",
    "한국어",
    "привет",
    "😀👩‍🚀",
)
_RANDOM_TEXTS = 200
_SPACE_LIKE = ("Zs", "Zl", "Zp", "Cc", "Cf")
_HIGHEST = 0x30000  # code points above are rare, private or not assigned


class _Fast(Protocol):
    """The part of ``fastokens.Tokenizer`` that is used."""

    def encode(self, text: str, add_special_tokens: bool, /) -> Any: ...
    def encode_batch(self, texts: list[str], add_special_tokens: bool, /) -> list[Any]: ...


def reference_of(own: tokenizers.Tokenizer) -> Batch:
    """Return a function that encodes texts with the ``tokenizers`` library."""

    def batch(texts: Sequence[str], framed: bool) -> list[Sequence[int]]:
        if len(texts) == 1 and len(texts[0]) < _SHORT:
            return [own.encode(texts[0], add_special_tokens=framed).ids]
        return [one.ids for one in own.encode_batch_fast(list(texts), add_special_tokens=framed)]

    return batch


def fast_copy(own: tokenizers.Tokenizer) -> _Fast | None:
    """Return the faster tokenizer of the same vocabulary, or None.

    The result is None if ``fastokens`` is not installed. It is also None, with the reason in the log, if ``fastokens``
    cannot read the vocabulary, fails on a text, or makes other ids of a text than ``own``. The call takes about 4 s for
    150,000 tokens and 0.1 s for 1,000, once per process.
    """
    try:
        read = importlib.import_module("fastokens").Tokenizer.from_json_str
    except ImportError:
        return None
    return _checked(read, own)


@lru_cache(maxsize=VOCABULARIES)
def _checked(read: Callable[[str], _Fast], own: tokenizers.Tokenizer) -> _Fast | None:
    try:
        fast = read(own.to_str())
    except Exception as error:
        logger.info("fastokens cannot be used with this tokenizer: %s", error)
        return None
    probes = list(_probes(own))
    for texts, framed in ((probes, False), (probes[::_FRAMED_EVERY], True)):
        expected = own.encode_batch_fast(texts, add_special_tokens=framed)
        try:
            got = fast.encode_batch(texts, framed)
        except Exception as error:
            logger.warning("fastokens is not used: it failed on a text (%s)", error)
            return None
        for text, one, other in zip(texts, expected, got, strict=True):
            if one.ids != other.ids:
                logger.warning("fastokens is not used: it makes other tokens of %r", text[:80])
                return None
    return fast


class ComparedTokenizer:
    """A tokenizer that encodes all texts with ``fast``, and some of them with ``reference`` too, to compare the ids.

    At the first difference, ``fast`` is dropped. If ``fast`` fails on texts that ``reference`` can encode, it is
    dropped, too. If both fail, the error of ``reference`` is raised. Safe to call from several threads.
    """

    def __init__(self, fast: _Fast, reference: Batch) -> None:
        self._fast: _Fast | None = fast
        self._reference = reference
        self._calls = 0

    @property
    def is_fast(self) -> bool:
        """True until ``fast`` makes other ids or fails; ids that it made before may then be wrong."""
        return self._fast is not None

    def __call__(self, texts: Sequence[str], framed: bool) -> list[Sequence[int]]:
        """Return the ids of ``texts``; ``framed``: with BOS and the like."""
        fast = self._fast
        if fast is None:
            return self._reference(texts, framed)
        self._calls += 1
        try:
            ids: list[Sequence[int]] = [fast.encode(text, framed).ids for text in texts]
            is_alike = self._calls % _COMPARED_EVERY > 0 or self._agree(
                fast, texts[self._calls % len(texts)], framed
            )
        except Exception as error:
            expected = self._reference(texts, framed)  # raises if neither can encode the text
            self._drop(f"it failed ({error})")
            return expected
        if is_alike:
            return ids
        self._drop("it made other tokens of a text than the tokenizers library")
        return self._reference(texts, framed)

    def _agree(self, fast: _Fast, text: str, framed: bool) -> bool:
        """Return True if both tokenizers make the same ids of ``text``, or of the beginning of a long ``text``."""
        begin = text[:_COMPARED_CHARACTERS]
        return list(fast.encode(begin, framed).ids) == list(self._reference([begin], framed)[0])

    def _drop(self, reason: str) -> None:
        if self._fast is not None:
            self._fast = None
            logger.error("fastokens is not used from now on: %s", reason)


def _probes(own: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts on which tokenizers may differ: all tokens, Unicode, white space, long runs, random texts."""
    tokens = own.decode_batch([[number] for number in own.get_vocab().values()], skip_special_tokens=False)
    yield from tokens
    for start in range(0, len(tokens), _TOGETHER):
        yield "".join(tokens[start : start + _TOGETHER])
    for added in own.get_added_tokens_decoder().values():
        text = added.content
        yield from (f"a{text}b", f" {text} ", f"{text}{text}", f"x\n{text}\n", text[:-1], text[1:])
    yield from _unicode()
    for space in _all_spaces():
        yield from (f"x{' ' * count}{space}y{space}{space}<{space}\n" for count in (0, 1, 2, 3))
    for space in _SPACES:
        yield from (f"a{space * count}b 1{space * count}" for count in (1, 2, 3, 7, 40))
        yield from (space + other for other in _SPACES)
    for run in (*_WORDS, *_SPACES, "a", "A", "7", "=", "-", "é", "e\u0301", "0123456789abcdef"):
        yield run * (_RUN // len(run))
    chance = random.Random(0)
    pieces = (
        *_WORDS,
        *_SPACES,
        *"abcXYZ0189'\".,;:!?()[]{}<>|/\\_-+*&^%$#@~`\u0301\u0308\u200d\ufe0f\u1160\u11a8\x00\x1f",
    )
    for _ in range(_RANDOM_TEXTS):
        yield "".join(chance.choices([*pieces, chance.choice(tokens)], k=chance.randrange(2, 60)))


def _unicode() -> Iterator[str]:
    """Yield eight random code points of each 128: side by side, after a letter, and with a combining accent."""
    chance = random.Random(1)
    for first in (*range(0, 0xD800, 0x80), *range(0xE000, _HIGHEST, 0x80)):
        some = [chr(first + chance.randrange(0x80)) for _ in range(8)]
        yield "".join(some) + " " + " a".join(some) + "\u0301".join(some)


def _all_spaces() -> list[str]:
    """Return characters that some regex engine treats, or once treated, as white space; and invisible characters."""
    return [chr(point) for point in range(0x3001) if unicodedata.category(chr(point)) in _SPACE_LIKE]
