"""Text to token ids, without holding up the event loop, and no part of a text twice."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from router_core.types import Tokenizer
from slime_radix_cache.abilities import LOSSY, Abilities, examine
from slime_radix_cache.backend import own_copy
from slime_radix_cache.parts import Part, Parts, cut

__all__ = ["Encoder"]

logger = logging.getLogger(__name__)

#: Of texts and their ids; some hundred system prompts of 10k tokens.
_MAX_BYTES = 64 << 20

#: Ids of several texts, with or without BOS and the like.
_Batch = Callable[[Sequence[str], bool], list[Sequence[int]]]


class Encoder:
    """Tokenises prompts.

    Of a tokenizer of transformers it uses a copy of the Rust one inside: transformers sets truncation and padding
    on the shared one, and only ``encode_batch_fast`` lets other threads run while it works. Any other tokenizer
    is called as it is, and has to bear calls from two threads. ``abilities`` are what it was found to allow.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, add_special_tokens: bool = False, max_bytes: int = _MAX_BYTES
    ) -> None:
        own = own_copy(tokenizer)
        self._batch: _Batch = _batch_of(own) if own is not None else _one_by_one(tokenizer)
        self._add_special_tokens = add_special_tokens
        self.abilities = self._examined(own, tokenizer)
        self._guards = [(guard, list(self._batch([guard], False)[0])) for guard in self.abilities.guards]
        self._parts = Parts(self._encoded, max_bytes=max_bytes)

    def _examined(self, own: tokenizers.Tokenizer | None, tokenizer: Tokenizer) -> Abilities:
        def encode(text: str, framed: bool) -> Sequence[int]:
            return self._batch([text], framed)[0]

        if own is None:
            found = examine(encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), ())
        else:
            added = list(own.get_added_tokens_decoder().values())
            found = examine(encode, lambda ids: str(own.decode(ids, skip_special_tokens=False)), added)
        if found.refused is not None:
            logger.warning("no answer will be exact with this tokenizer: %s", found.refused)
        return found

    @property
    def refused(self) -> str | None:
        """The reason why no answer may be called exact with this tokenizer; None when answers may."""
        return LOSSY if self.abilities.refused is not None else None

    async def encode(self, text: str, *, begins: bool) -> bytes:
        """Packed int32 ids of ``text``; ``begins`` when nothing comes before it, so that a BOS may.

        Exactly what tokenising all of it at once gives. Raises what the tokenizer raises.
        """
        frame = self.abilities.frame
        framed = begins and self._add_special_tokens
        if framed and frame is None:
            return await self._parts.ids([Part(text, framed=True)])
        first, *others = cut(text, self.abilities.seams)
        ids = await self._parts.ids([self._first(first, begins), *map(Part, others)])
        if not framed or frame is None:
            return ids
        before, behind = frame
        return array("i", before).tobytes() + ids + array("i", behind).tobytes()

    def _first(self, text: str, begins: bool) -> Part:
        seams = self.abilities.seams
        at_seam = seams is not None and seams.match(text) is not None
        return Part(text, follows=bool(self._guards) and not begins and not at_seam)

    def _encoded(self, parts: Sequence[Part]) -> list[Sequence[int]]:
        framed = parts[0].framed  # such a part comes alone
        together = [part.text for part in parts if not part.follows]
        plain = iter(self._batch(together, framed) if together else [])
        return [self._guarded(part.text) if part.follows else next(plain) for part in parts]

    def _guarded(self, text: str) -> Sequence[int]:
        """Ids of a text that follows others."""
        for guard, ahead in self._guards:
            ids = self._batch([guard + text], False)[0]
            if list(ids[: len(ahead)]) == ahead:
                return ids[len(ahead) :]
        return self._batch([text], False)[0]  # with a space of the tokenizer's own, which the engine gets too

    def as_dict(self) -> dict[str, Any]:
        """What the tokenizer allows and what was tokenised, ready for JSON."""
        parts = self._parts
        return {
            "refused": self.abilities.refused,
            "cuts_texts": self.abilities.seams is not None,
            "parts_encoded": parts.encoded,
            "parts_reused": parts.reused,
            "tokens_encoded": parts.tokens_encoded,
            "tokens_reused": parts.tokens_reused,
        }


def _batch_of(own: tokenizers.Tokenizer) -> _Batch:
    def batch(texts: Sequence[str], framed: bool) -> list[Sequence[int]]:
        return [one.ids for one in own.encode_batch_fast(list(texts), add_special_tokens=framed)]

    return batch


def _one_by_one(tokenizer: Tokenizer) -> _Batch:
    return lambda texts, framed: [tokenizer.encode(text, add_special_tokens=framed) for text in texts]
