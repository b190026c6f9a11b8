"""Ids are decoded by the bytes of their tokens as the ``tokenizers`` library decodes them."""

from __future__ import annotations

import logging

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_cache.tokens.conftest import Loaded
from radix_cache.tokens.vocabularies import VOCABULARIES
from slime_radix_cache.tokens import byte_tokens
from slime_radix_cache.tokens.backend import own_copy
from slime_radix_cache.tokens.byte_tokens import byte_decoder

_BYTE_LEVEL = {"qwen", "llama3", "gpt2-prefixed", "dashscope-qwen", "mistral-tekken"}


@pytest.fixture
def qwen() -> tokenizers.Tokenizer:
    """A tokenizer that a test may change."""
    rust: tokenizers.Tokenizer = (
        next(one for one in VOCABULARIES if one.name == "qwen").build().backend_tokenizer
    )
    return rust


def check(own: tokenizers.Tokenizer) -> None:
    decode = byte_decoder(own)
    assert decode is not None
    numbers = st.integers(0, own.get_vocab_size() + 2)
    broken = [one for one in range(own.get_vocab_size()) if "\ufffd" in own.decode([one])]

    @settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
    @given(st.lists(numbers | st.sampled_from(broken), max_size=12), st.booleans())
    def same(ids: list[int], skip: bool) -> None:
        assert decode(ids, skip) == own.decode(ids, skip_special_tokens=skip)

    same()


def test_same_texts_as_the_tokenizers_library(loaded: Loaded) -> None:
    own = own_copy(loaded.tokenizer)
    assert own is not None
    if loaded.vocabulary.name in _BYTE_LEVEL:
        check(own)
    else:
        assert byte_decoder(own) is None


def test_added_tokens_are_written_as_they_are(qwen: tokenizers.Tokenizer) -> None:
    qwen.add_tokens(["a b", "é", "日本", " x", tokenizers.AddedToken("z q", special=True)])
    check(qwen)


def test_vocabulary_that_is_read_in_another_way_is_not_used(
    qwen: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(byte_tokens._BYTES, "a", 0x62)
    with caplog.at_level(logging.WARNING):
        assert byte_decoder(qwen) is None
    assert "tokens are not decoded as bytes" in caplog.text
