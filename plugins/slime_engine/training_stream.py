"""The token stream that the model learns from: the corpus, tokenised with random deviations.

Real models sample tokens that their tokenizer would not produce for the same text. The n-gram model learns to sample
such tokens, too: some tokens of its training stream are cut into shorter tokens, also inside a UTF-8 character. Some
markup is spelt out, such as ``<think>`` in the tokens ``<``, ``think``, ``>``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from slime_engine.tokenizer import MARKUP, EngineTokenizer

__all__ = ["training_stream"]

#: Passes over the corpus, each cut differently.
_COPIES = 6
_CUT_PROBABILITY = 0.05
_SPELT_OUT_PROBABILITY = 0.15


def training_stream(tokenizer: EngineTokenizer, documents: Sequence[str]) -> list[list[int]]:
    """Return six token lists per document, each ending in ``<|endoftext|>``. Every call returns the same lists."""
    dice = random.Random(0)
    cuts = _Cuts(tokenizer)
    canonical = [tokenizer.encode(text) for text in documents]
    return [[*cuts.disturb(ids, dice), tokenizer.pad_id] for _ in range(_COPIES) for ids in canonical]


class _Cuts:
    """The pairs of tokens that each token can be cut into, and the spelt-out markup."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        id_of = {text: token_id for token_id, text in enumerate(tokenizer.token_bytes)}
        self._spelt_out = {id_of[text.encode()]: tokenizer.encode_plain(text) for text in MARKUP}
        whole = tokenizer.special_ids | self._spelt_out.keys()
        self._pairs = [
            [
                (id_of[text[:cut]], id_of[text[cut:]])
                for cut in range(1, len(text))
                if text[:cut] in id_of and text[cut:] in id_of
            ]
            if token_id not in whole
            else []
            for token_id, text in enumerate(tokenizer.token_bytes)
        ]

    def disturb(self, ids: Sequence[int], dice: random.Random) -> Iterator[int]:
        for token_id in ids:
            spelt_out = self._spelt_out.get(token_id)
            if spelt_out and dice.random() < _SPELT_OUT_PROBABILITY:
                yield from self.disturb(spelt_out, dice)
            elif (pairs := self._pairs[token_id]) and dice.random() < _CUT_PROBABILITY:
                yield from self.disturb(dice.choice(pairs), dice)
            else:
                yield token_id
