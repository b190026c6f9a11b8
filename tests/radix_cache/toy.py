"""A tokenizer so small that a test can be read: its tokens overlap, so texts can be spelt in many ways."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slime_radix_cache.index.losses import Losses
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.tokens.special_tokens import SpecialTokens

EOS = 9
TOKENS = {1: "a", 2: "b", 3: "ab", 4: "ba", 5: "bab", 6: "é", 7: "<", 8: "e", 10: ">", EOS: "<e>"}


def pack(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def unpack(ids: bytes) -> list[int]:
    return array("i", ids).tolist()


def spell(ids: Sequence[int]) -> str:
    return "".join(TOKENS[token] for token in ids)


def encode(text: str) -> list[int]:
    """Greedy, longest token first: what an engine samples often differs."""
    ids = []
    while text:
        token, word = max(
            ((token, word) for token, word in TOKENS.items() if text.startswith(word)),
            key=lambda pair: len(pair[1]),
        )
        ids.append(token)
        text = text[len(word) :]
    return ids


def cut(ids: bytes, text: bytes) -> tuple[int, int]:
    """The most tokens that spell a prefix of ``text``; the EOS shows nothing."""
    length = covered = 0
    for token in unpack(ids):
        word = TOKENS[token].encode()
        if token == EOS or not text.startswith(word, covered):
            break
        length, covered = length + 1, covered + len(word)
    return length, covered


def sampled(*ids: int, logprobs: Sequence[float] | None = None, version: str | None = None) -> Sampled:
    """An answer with these tokens, a hidden EOS at its end if it has one."""
    visible = len(ids) - (ids[-1] == EOS)
    values = logprobs if logprobs is not None else [-token / 7 for token in ids]
    return Sampled(
        ids=pack(*ids),
        logprobs=array("d", values).tobytes(),
        text=spell(ids[:visible]),
        visible=visible,
        tail=spell(ids[visible:]),
        versions=((version, len(ids)),),
        finish_reason='{"type":"stop"}',
    )


def trajectories(limits: Limits | None = None, losses: Losses | None = None) -> Trajectories:
    special = SpecialTokens([TOKENS[EOS]])
    return Trajectories(limits if limits is not None else Limits(), cut, special.around, losses)
