"""Places of tokens in a text."""

from __future__ import annotations

from slime_engine.tokenizer import train_tokenizer
from slime_openai.responses.logprobs import Logprobs
from slime_openai.responses.text_offsets import TextOffsets


def test_tokens_of_one_character_have_its_place() -> None:
    tokenizer = train_tokenizer(["a text to train with"])
    first, *more = tokenizer.encode("😀")
    letter = tokenizer.encode("x")
    offsets = TextOffsets(Logprobs(tokenizer))

    def places(ids: list[int]) -> list[int]:
        return offsets.of([(-0.5, token, None) for token in ids])

    assert places([*letter, first]) == [0, 1]
    assert places([*more, *letter]) == [1] * len(more) + [2]
    ids = [first] * 10 + letter  # bytes that are no UTF-8
    assert places(ids)[:8] == [3] * 8
    assert offsets.place == 3 + len(tokenizer.decode(ids, skip_special_tokens=False))
