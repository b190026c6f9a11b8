"""Every kind of tokenizer: what it is found to allow, its conversations, and texts that are tokenised in parts."""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_cache.machine.rollouts import staged
from slime_radix_cache.tokens.encoding import Encoder

if TYPE_CHECKING:
    from radix_cache.tokens.conftest import Loaded

pytestmark = pytest.mark.anyio

_WORDS = (
    "Hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "a",
    "é",
    "e\u0301",
    "日本",
    "😀",
    "it's",
    "12",
    "<",
    "|>",
    "[",
    "s>",
    "▁",
    "\t",
    "x1y",
    "def f(a):\nreturn a\n",
    " The",
)


def unpacked(ids: bytes) -> list[int]:
    return array("i", ids).tolist()


async def test_conversations_are_the_journals_or_said_not_to_be(loaded: Loaded) -> None:
    markup = loaded.vocabulary.markup
    async with staged(loaded.tokenizer, loaded.checkpoint, markup) as stage:
        random = Random(loaded.vocabulary.name)
        count = 4 if loaded.vocabulary.real else 12  # with 130,000 tokens a conversation takes a second
        some = [stage.begin(markup.system + stage.asked(random)) for _ in range(count)]
        for turn in range(4):
            await stage.all_turn(some, random)
            if turn < 3:
                for conversation in some:
                    await stage.go_on(conversation, random)
        if loaded.vocabulary.trusted:
            await stage.judge_all()
            assert stage.outcomes["exact"] >= count // 2
            return
        for conversation in stage.conversations:
            answer = await stage.retrieve(conversation.text, conversation.name)
            assert (answer["exact"], answer["inexact_reason"]) == (False, "lossy_tokenizer")
            assert not any(answer["loss_mask"])
        stats = (await stage.client.get("/cache_stats")).json()
    assert stats["untouched"] == {"lossy_tokenizer": stage.turns}
    assert stats["inexact"].keys() == {"lossy_tokenizer"}
    assert stats["tokenizer"]["refused"]


def test_a_tokenizer_is_trusted_or_refused(loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    encoder = Encoder(loaded.tokenizer)
    trusted = loaded.vocabulary.trusted
    assert (encoder.refused is None) == trusted
    assert ("no answer will be exact" in caplog.text) == (not trusted)
    assert encoder.as_dict()["cuts_texts"] == trusted


async def test_a_text_that_goes_on_from_others_gets_no_space_of_its_own(loaded: Loaded) -> None:
    if not loaded.vocabulary.trusted:
        return
    encoder, tokenizer = Encoder(loaded.tokenizer), loaded.tokenizer
    before = tokenizer.encode("The answer", add_special_tokens=False)
    for text in ("Hello", " Hello", "  a", "\n", ".", "日本語 😀"):
        ids = unpacked(await encoder.encode(text, begins=False))
        assert tokenizer.decode([*before, *ids]) == tokenizer.decode(before) + text


async def test_parts_have_the_tokens_of_the_whole(loaded: Loaded) -> None:
    """Any text, with special tokens anywhere in it, at once and again out of what is remembered."""
    tokenizer = loaded.tokenizer
    special = [token.content for token in tokenizer.added_tokens_decoder.values()][:40]
    pieces = st.lists(
        st.sampled_from([*_WORDS, *special, *loaded.vocabulary.markup.special * 3]), max_size=40
    )
    encoders = {
        framed: Encoder(tokenizer, add_special_tokens=framed, long_part=16) for framed in (False, True)
    }
    long = "the harbour wakes. " * 20

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pieces=pieces, framed=st.booleans(), long_at=st.integers(0, 40))
    def check(pieces: list[str], framed: bool, long_at: int) -> None:
        text = "".join([*pieces[:long_at], long, *pieces[long_at:], long])
        whole = tokenizer.encode(text, add_special_tokens=framed)
        for _ in range(2):
            assert unpacked(anyio.from_thread.run(_encode, encoders[framed], text)) == whole

    await anyio.to_thread.run_sync(check)
    assert all(encoder.as_dict()["parts_reused"] for encoder in encoders.values())


async def _encode(encoder: Encoder, text: str) -> bytes:
    return await encoder.encode(text, begins=True)


async def test_a_system_prompt_is_tokenised_once_for_all_that_share_it(loaded: Loaded) -> None:
    if not loaded.vocabulary.trusted:
        return
    encoder, tokenizer, markup = Encoder(loaded.tokenizer), loaded.tokenizer, loaded.vocabulary.markup
    rules = [markup.ask.format(f"Rule {number}: " + "Help people. " * 60) for number in range(30)]
    system = "".join(rule + markup.end for rule in rules)
    async with anyio.create_task_group() as tasks:  # a group's first turn: the very same prompt at once
        for _ in range(8):
            tasks.start_soon(_encode, encoder, system)
    size = len(tokenizer.encode(system, add_special_tokens=False))
    assert size > 5000
    assert encoder.as_dict()["tokens_encoded"] <= size
    for number in range(8):
        text = system + markup.ask.format(f"Question {number}")
        ids = unpacked(await _encode(encoder, text))
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    counts = encoder.as_dict()
    assert counts["tokens_encoded"] < 1.1 * size
    assert counts["tokens_reused"] > 7 * size
