"""The faster tokenizer is used as long as it makes the ids of the ``tokenizers`` library."""

from __future__ import annotations

import logging
import sys
import threading
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deadlines import HANG_S
from radix_cache.tokens.conftest import Loaded
from radix_cache.tokens.vocabularies import VOCABULARIES
from slime_fairness.turns import FairThreads
from slime_radix_cache.tokens import fast_tokenizer
from slime_radix_cache.tokens.backend import own_copy
from slime_radix_cache.tokens.encoding import Encoder
from slime_radix_cache.tokens.fast_tokenizer import ComparedTokenizer, fast_copy, reference_of
from slime_radix_cache.tokens.parts import Part, Parts

#: fastokens 0.3 refuses the others: it does not know their normalizer or pre-tokenizer.
_KNOWN = {
    "qwen",
    "llama3",
    "gpt2-prefixed",
    "llama2-legacy",
    "dashscope-qwen",
    "mistral-tekken",
    "mistral-7b-legacy",
}

_TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from([" ", "\n", "\t", "it's", "<|im_start|>", "<think>", "日本", "e\u0301", "12", "\u3000"]),
    max_size=20,
).map("".join)

Change = Callable[[str], str]


class Rival:
    """A tokenizer that changes texts before it encodes them."""

    def __init__(self, own: tokenizers.Tokenizer, change: Change) -> None:
        self._own = own
        self._change = change

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return self._own.encode(self._change(text), add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        return [self.encode(text, add_special_tokens) for text in texts]


@pytest.fixture
def llama3() -> Any:
    return next(one for one in VOCABULARIES if one.name == "llama3").build()


def install(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, change: Change) -> None:
    """Let a rival stand in the place of ``fastokens``."""

    def from_json_str(text: str) -> Rival:
        return Rival(tokenizers.Tokenizer.from_str(text), change)

    module = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=from_json_str))
    monkeypatch.setitem(sys.modules, "fastokens", module)


def right_ids(tokenizer: Any, text: str) -> list[int]:
    own = own_copy(tokenizer)
    assert own is not None
    found: list[int] = own.encode(text, add_special_tokens=False).ids
    return found


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def test_same_ids_as_the_tokenizers_library(loaded: Loaded) -> None:
    pytest.importorskip("fastokens")
    own = own_copy(loaded.tokenizer)
    assert own is not None
    fast = fast_copy(own)
    assert (fast is not None) == (loaded.vocabulary.name in _KNOWN)
    if fast is None:
        return

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(_TEXTS, st.booleans())
    def same(text: str, framed: bool) -> None:
        assert list(fast.encode(text, framed).ids) == own.encode(text, add_special_tokens=framed).ids

    same()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: unicodedata.normalize("NFC", text), id="composes"),
        pytest.param(lambda text: text.replace("\r\n", "\n"), id="line-ends"),
        pytest.param(lambda text: text.replace("<|eot_id|>", "<|eot_id |>"), id="special-token-missed"),
        pytest.param(lambda text: text.replace("\u3000", " "), id="wide-space"),
        pytest.param(lambda text: text.translate(dict.fromkeys(range(0xFF00, 0xFF80), "?")), id="fullwidth"),
        pytest.param(lambda text: text.replace("  \u180e", "  "), id="former-white-space"),
        pytest.param(lambda text: text[:500], id="long-runs-cut"),
        pytest.param(lambda text: text.replace("'LL", "'ll"), id="contraction"),
    ],
)
def test_a_tokenizer_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, llama3: Any, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, llama3, change)
    own = own_copy(llama3)
    assert own is not None
    assert fast_copy(own) is None
    assert "fastokens is not used" in caplog.text


def test_all_tokens_special_tokens_and_rows_of_spaces_are_compared(llama3: Any) -> None:
    own = own_copy(llama3)
    assert own is not None
    compared = set(fast_tokenizer._probes(own))
    assert compared >= {
        own.decode([number], skip_special_tokens=False) for number in range(own.get_vocab_size())
    }
    for added in own.get_added_tokens_decoder().values():
        assert compared >= {f"a{added.content}b", f" {added.content} ", added.content[1:]}
    assert compared >= {"a\u2003\u2003\u2003b 1\u2003\u2003\u2003", "\t\u3000", " " * 600}


def test_without_fastokens_the_tokenizers_library_works(monkeypatch: pytest.MonkeyPatch, llama3: Any) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert Encoder(llama3).as_dict()["is_fast"] is False


@pytest.mark.anyio
async def test_a_difference_found_in_use_ends_it(
    monkeypatch: pytest.MonkeyPatch, llama3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, llama3, lambda text: text.replace("umbrella stand", "umbrella-stand"))
    encoder = Encoder(llama3)
    assert encoder.as_dict()["is_fast"] is True
    right = right_ids(llama3, "umbrella stand")
    assert ids(await encoder.encode("umbrella stand", begins=True)) != right  # the case that sampling is for
    with caplog.at_level(logging.ERROR):
        for number in range(200):
            found = ids(await encoder.encode(f"umbrella stand {number}", begins=True))
    assert encoder.as_dict()["is_fast"] is False
    assert caplog.text.count("fastokens is not used from now on") == 1
    assert found == right_ids(llama3, "umbrella stand 199")
    # Tokens that were kept from before are not given again.
    assert ids(await encoder.encode("umbrella stand", begins=True)) == right


@pytest.mark.anyio
async def test_a_failure_in_use_ends_it(monkeypatch: pytest.MonkeyPatch, llama3: Any) -> None:
    def fail(text: str) -> str:
        if text == "Boom":
            raise RuntimeError("a bug")
        return text

    install(monkeypatch, llama3, fail)
    encoder = Encoder(llama3)
    right = right_ids(llama3, "Boom")
    assert ids(await encoder.encode("Boom", begins=True)) == right
    assert encoder.as_dict()["is_fast"] is False


@pytest.mark.anyio
async def test_long_texts_are_compared_too(monkeypatch: pytest.MonkeyPatch, llama3: Any) -> None:
    install(monkeypatch, llama3, lambda text: text.replace("umbrella stand", "umbrella-stand"))
    encoder = Encoder(llama3)
    for number in range(110):
        await encoder.encode(f"umbrella stand {number}. " * 300, begins=True)
    assert encoder.as_dict()["is_fast"] is False


def test_a_text_that_no_tokenizer_takes_is_no_difference(llama3: Any) -> None:
    pytest.importorskip("fastokens")
    own = own_copy(llama3)
    assert own is not None
    fast = fast_copy(own)
    assert fast is not None
    compared = ComparedTokenizer(fast, reference_of(own))
    with pytest.raises(TypeError):
        compared(["\ud800"], False)
    assert compared.is_fast


@pytest.mark.anyio
async def test_parts_in_the_making_are_shared_and_forgotten() -> None:
    made: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def encode(parts: Sequence[Part]) -> list[Sequence[int]]:
        made.extend(part.text for part in parts)
        begun.set()
        may_end.wait(HANG_S)
        return [[1] for _ in parts]

    parts = Parts(encode, FairThreads(), max_bytes=1 << 20)
    part = Part("x" * 5000)
    found: list[bytes] = []

    async def ask() -> None:
        found.append(await parts.ids([part], None, keeps=False))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)
        await anyio.to_thread.run_sync(begun.wait, HANG_S)
        may_end.set()
    assert (len(found), len(made)) == (5, 1)
    begun.clear()
    may_end.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(parts.ids, [part], None)
        await anyio.to_thread.run_sync(begun.wait, HANG_S)
        parts.forget()
        may_end.set()
    await parts.ids([part], None)
    assert len(made) == 3  # what was made when all was forgotten is not kept


@pytest.mark.anyio
async def test_short_texts_are_encoded_each_time(llama3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look one up among the parts that are kept would take as long."""
    install(monkeypatch, llama3, lambda text: text)
    encoder = Encoder(llama3)
    for text in ("short", "short", "it is long " * 60, "it is long " * 60):
        assert ids(await encoder.encode(text, begins=True)) == right_ids(llama3, text)
    told = encoder.as_dict()
    assert (told["parts_encoded"], told["parts_reused"]) == (3, 1)
