"""Tokenisation of texts, with a cache of common parts. Long texts are tokenised off the event loop."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import tokenizers

from router_core.errors import BadRequest
from router_core.types import Tokenizer
from slime_fairness.turns import FairThreads
from slime_radix_cache.tokens.abilities import LOSSY, Abilities, examine
from slime_radix_cache.tokens.backend import own_copy
from slime_radix_cache.tokens.fast_tokenizer import Batch, ComparedTokenizer, fast_copy, reference_of
from slime_radix_cache.tokens.parts import SHORT_PART, Part, Parts, cut
from slime_radix_cache.tokens.spelling import Spelling

__all__ = ["MAX_TOKENS", "Encoder", "PromptTooLong"]

logger = logging.getLogger(__name__)

#: Default size of the cache of parts: a few hundred system prompts of 10k tokens.
_MAX_BYTES = 64 << 20

#: Default limit for one prompt: few models have a longer context.
MAX_TOKENS = 1 << 20
#: A text with more characters than this times the limit is refused without tokenising it. Few texts have so many
#: characters per token.
_MOST_CHARACTERS = 16
#: In characters. A part longer than _LONG_PART is cut where a cut is safe. A part without such a place may have up to
#: _LONGEST_PART characters.
_LONG_PART = 1 << 15
_LONGEST_PART = 1 << 20
#: About how many characters are tokenised in one call: a tokenizer needs a hundred times their size in memory.
_AT_ONCE = 1 << 15
#: Of a long text, about this many characters from its beginning are cached, in parts, for texts that begin alike.
_KEPT = 1 << 20
#: How many characters are encoded in UTF-8 in one call: about 0.5 ms of work.
_LONG_UTF8 = 1 << 20
#: Packed ids of at least so many bytes are decoded in a thread: about 2 ms of work.
_MANY_IDS = 1 << 15


class PromptTooLong(BadRequest):
    """A prompt too long for ``--max-prompt-tokens``."""

    def __init__(self, got: str, max_tokens: int) -> None:
        super().__init__(f"wanted a prompt of at most {max_tokens} tokens (--max-prompt-tokens), got {got}")


class Encoder:
    """Tokenizer of prompts.

    If the tokenizer has a Rust tokenizer inside, as most transformers tokenizers have, a copy of the Rust tokenizer is
    used, since transformers sets truncation and padding on the original. The copy's calls for a batch of texts release
    the GIL, its other calls do not. A tokenizer without a Rust tokenizer inside is called directly, and must be safe to
    call from several threads. ``abilities``: results of the tests of the tokenizer. ``max_tokens``: limit for one
    prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_special_tokens: bool = False,
        max_tokens: int = MAX_TOKENS,
        max_bytes: int = _MAX_BYTES,
        long_part: int = _LONG_PART,
        threads: FairThreads | None = None,
    ) -> None:
        own = own_copy(tokenizer)
        fast = fast_copy(own) if own is not None else None
        self._batch = reference_of(own) if own is not None else _one_by_one(tokenizer)
        self._compared = ComparedTokenizer(fast, self._batch) if fast is not None else None
        if self._compared is not None:
            self._batch = self._compared
        self._add_special_tokens = add_special_tokens
        self._max_tokens = max_tokens
        self._long_part = long_part
        self.abilities = self._examined(own, tokenizer)
        self._guards = [(guard, list(self._batch([guard], False)[0])) for guard in self.abilities.guards]
        self._threads = threads if threads is not None else FairThreads()
        self._parts = Parts(self._encoded, self._threads, max_bytes=max_bytes)

    def _examined(self, own: tokenizers.Tokenizer | None, tokenizer: Tokenizer) -> Abilities:
        def encode(text: str, framed: bool) -> Sequence[int]:
            return self._batch([text], framed)[0]

        if own is None:
            found = examine(encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), ())
        else:
            added = list(own.get_added_tokens_decoder().values())
            found = examine(
                encode, lambda ids: str(own.decode(ids, skip_special_tokens=False)), added, own.get_vocab()
            )
        if found.refused is not None:
            logger.warning("no answer will be exact with this tokenizer: %s", found.refused)
        return found

    @property
    def refused(self) -> str | None:
        """The reason why no answer can be exact with this tokenizer; None if answers can be exact."""
        return LOSSY if self.abilities.refused is not None else None

    async def encode(self, text: str, *, begins: bool, client: str | None = None) -> bytes:
        """Return the packed int32 ids of ``text``. ``begins``: nothing comes before it, so a BOS may be added.

        The ids are exactly those of tokenising the whole text at once. ``client``: see :mod:`slime_fairness.turns`.
        Raises BadRequest if the text is too long, and the tokenizer's own errors.
        """
        self.check_text(text)
        if self._compared is not None and not self._compared.is_fast:
            self._compared = None
            self._parts.forget()  # the dropped tokenizer encoded these parts
        frame = self.abilities.frame
        framed = begins and self._add_special_tokens
        if framed and frame is None:
            whole = Part(text, framed=True)
            _check_part(whole)
            ids = await self._parts.ids([whole], client)
        elif len(text) < SHORT_PART and self._compared is not None:  # a look-up takes as long
            ids = self._parts.made_now(Part(text, follows=not begins and self._needs_guard(text)))
        elif len(text) > self._long_part:
            ids = await self._encode_long(text, begins=begins, client=client)
        else:
            ids = await self._parts.ids(list(self._cut(text, begins=begins)), client)
        self.check_length(len(ids) // 4)
        if not framed or frame is None:
            return ids
        before, behind = frame
        return array("i", before).tobytes() + ids + array("i", behind).tobytes()

    async def _encode_long(self, text: str, *, begins: bool, client: str | None) -> bytes:
        """Cut and tokenise ``text`` step by step, which limits the memory of the tokenizer.

        Only the beginning is cached for other texts: the whole text would evict the parts that texts have in common.
        """
        cut_off = self._cut(text, begins=begins)
        found: list[bytes] = []
        tokens = characters = 0
        while parts := await self._threads.run(lambda: _some(cut_off), client):
            found.append(await self._parts.ids(parts, client, keeps=characters < _KEPT))
            tokens += len(found[-1]) // 4
            characters += sum(len(part.text) for part in parts)
            self.check_length(tokens)
        return b"".join(found)

    async def text_of(self, spelling: Spelling, ids: bytes, client: str | None) -> str:
        """Return the text of ``ids`` (packed), including the text of special tokens. Raises PromptTooLong."""
        self.check_length(len(ids) // 4)
        if len(ids) < _MANY_IDS:
            return spelling.text_of(array("i", ids))
        return await self._threads.run(lambda: spelling.text_of(array("i", ids)), client)

    def check_length(self, tokens: int) -> None:
        """Raise PromptTooLong if ``tokens`` are too many for a prompt."""
        if tokens > self._max_tokens:
            raise PromptTooLong(f"{tokens} tokens", self._max_tokens)

    async def in_utf8(self, text: str, client: str | None) -> bytes:
        """Return ``text`` in UTF-8. Raises UnicodeEncodeError."""
        if len(text) < _LONG_UTF8:
            return text.encode()
        return await self._threads.run(lambda: _in_utf8(text), client)

    @property
    def max_characters(self) -> int:
        """Maximum length of a text; a longer text is refused before it is tokenised."""
        return self._max_tokens * _MOST_CHARACTERS

    def check_text(self, text: str) -> None:
        """Raise PromptTooLong if ``text`` has more than ``max_characters``."""
        if len(text) > self._max_tokens * _MOST_CHARACTERS:
            raise PromptTooLong(f"{len(text)} characters", self._max_tokens)

    def _cut(self, text: str, *, begins: bool) -> Iterator[Part]:
        seams, breaks = self.abilities.seams, self.abilities.breaks
        parts = cut(text, seams, breaks, self._long_part, follows=bool(self._guards))
        if not begins and self._needs_guard(text):
            yield next(parts)._replace(follows=True)
        yield from parts

    def _needs_guard(self, text: str) -> bool:
        """Return True if the ids of ``text`` may depend on whether other tokens come before it."""
        seams = self.abilities.seams
        return bool(self._guards) and (seams is None or seams.match(text) is None)

    def _encoded(self, parts: Sequence[Part]) -> list[Sequence[int]]:
        framed = parts[0].framed  # a framed part always comes alone
        together = [part.text for part in parts if not part.follows]
        plain = iter(self._batch(together, framed) if together else [])
        return [self._guarded(part.text) if part.follows else next(plain) for part in parts]

    def _guarded(self, text: str) -> Sequence[int]:
        """Return the ids of a text that follows other tokens."""
        for guard, ahead in self._guards:
            ids = self._batch([guard + text], False)[0]
            if list(ids[: len(ahead)]) == ahead:
                return ids[len(ahead) :]
        return self._batch([text], False)[0]  # no guard stays apart from the text

    def as_dict(self) -> dict[str, Any]:
        """Return the tokenizer's abilities and the counts of tokenisation, ready for JSON."""
        parts = self._parts
        return {
            "refused": self.abilities.refused,
            "is_fast": self._compared is not None and self._compared.is_fast,
            "cuts_texts": self.abilities.seams is not None,
            "parts_encoded": parts.encoded,
            "parts_reused": parts.reused,
            "tokens_encoded": parts.tokens_encoded,
            "tokens_reused": parts.tokens_reused,
        }


def _some(parts: Iterator[Part]) -> list[Part]:
    """Return the next parts to tokenise in one call. Raises BadRequest if a part is too long to tokenise."""
    some: list[Part] = []
    size = 0
    while size < _AT_ONCE and (part := next(parts, None)) is not None:
        _check_part(part)
        some.append(part)
        size += len(part.text)
    return some


def _in_utf8(text: str) -> bytes:
    """Return ``text`` in UTF-8, encoded in pieces: one call would hold the GIL too long."""
    whole = BytesIO()
    for start in range(0, len(text), _LONG_UTF8):
        whole.write(text[start : start + _LONG_UTF8].encode())
    return whole.getvalue()


def _check_part(part: Part) -> None:
    """Raise BadRequest if tokenising ``part`` would take too much memory."""
    if len(part.text) > _LONGEST_PART:
        raise BadRequest(
            f"wanted at most {_LONGEST_PART} characters in a row without a place to split them for tokenising, such as"
            f" a space, got {len(part.text)}; insert spaces, or send input_ids"
        )


def _one_by_one(tokenizer: Tokenizer) -> Batch:
    return lambda texts, framed: [tokenizer.encode(text, add_special_tokens=framed) for text in texts]
