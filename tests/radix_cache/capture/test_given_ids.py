"""Ids that the router gave away itself, sent back to it: what was sampled stays sampled."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits, routed
from radix_cache.tokens.vocabularies import VOCABULARIES
from router_core.cli import is_compiled
from slime_engine.tokenizer import EngineTokenizer
from slime_radix_cache.tokens.spelling import Spelling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("where", [0, 1, 3], ids=["first", "inside", "last"])
@pytest.mark.parametrize("sessions", ["ss", "sf", "s-", "--"], ids=["own", "fork", "nobody", "without"])
async def test_given_ids_keep_the_mask_of_what_a_text_does_not_show(
    client: Client, engine: ScriptedEngine, where: int, sessions: str
) -> None:
    names = [name if name != "-" else "" for name in sessions]
    (start,) = engine.tokenizer.encode("<|im_start|>")
    first = [5, 6, 7]
    first.insert(where, start)
    text = PROMPT + (await client.generate(PROMPT, [*first, engine.eos], names[0]))["text"] + NEXT
    text += (await client.generate(text, [8, 9, 10, engine.eos], names[0]))["text"]
    known = await client.retrieve(text, session_id=names[0])
    assert known["exact"]
    given = known["tokens"] + engine.tokenizer.encode("\n<|im_start|>user\n3<|im_end|>\n")
    answer = await client.give(given, [11, 12], names[1])
    whole = engine.tokenizer.decode(given) + answer["text"]
    got = await client.retrieve(whole, session_id=names[1])
    assert (got["exact"], got["tokens"]) == (True, [*given, 11, 12])
    size = len(known["tokens"])
    assert got["loss_mask"][:size] == known["loss_mask"]
    assert bits(got["rollout_logp"][:size]) == bits(known["rollout_logp"])


async def test_session_splits_at_its_first_sample_in_decomposed_text(start: Start, tmp_path: Path) -> None:
    """A client writes characters apart, the tokenizer composes them (NFC), and ids lead to the composed ones."""
    (vocabulary,) = (one for one in VOCABULARIES if one.name == "qwen")
    tokenizer, checkpoint = vocabulary.make(tmp_path)
    engine = ScriptedEngine(EngineTokenizer(tokenizer.backend_tokenizer))
    apart = unicodedata.normalize(
        "NFD", "<|im_start|>user\nété à Ångström 日<|im_end|>\n<|im_start|>assistant\n"
    )
    async with routed(start, engine, checkpoint) as client:
        text = apart + (await client.generate(apart, [300, 301, 302], "s"))["text"]
        known = await client.retrieve(text, session_id="s")
        assert known["exact"]
        (first,) = await client.records("s")
        given = known["tokens"] + engine.tokenizer.encode(NEXT)
        answer = await client.give(given, [311, 312], "s")
        (second,) = await client.records("s")
    assert (first["prompt"], first["prompt"] + first["response"]) == (apart, text)
    assert second["text"] == engine.tokenizer.decode(given) + answer["text"]
    assert second["prompt"] == unicodedata.normalize("NFC", apart)
    assert second["prompt"] + second["response"] == second["text"]
    assert second["prompt_length"] == first["prompt_length"]


async def test_session_splits_at_its_first_sample_inside_a_character(
    client: Client, engine: ScriptedEngine
) -> None:
    half = [engine.tokenizer.token_bytes.index(bytes([one])) for one in "☔".encode()]
    prompt = [*engine.tokenizer.encode("the "), *half[:2]]
    await client.give(prompt, [half[2], 300], "s")
    given = [*prompt, half[2], 300, 301]
    answer = await client.give(given, [302], "s")
    (record,) = await client.records("s")
    assert record["text"] == engine.tokenizer.decode(given) + answer["text"]
    assert record["tokens"] == [*given, 302]
    assert record["prompt"] == engine.tokenizer.decode(prompt)
    assert record["response"] == engine.tokenizer.decode(record["tokens"][len(prompt) :])


@pytest.mark.skipif(is_compiled(), reason="a compiled method cannot be replaced")
@pytest.mark.parametrize("kind", ["words", "special token", "half a character"])
async def test_ids_after_a_decoded_response_are_decoded_alone(
    client: Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer = engine.tokenizer
    half = [tokenizer.token_bytes.index(bytes([one])) for one in "☔".encode()]
    (start,) = tokenizer.encode("<|im_start|>")
    sampled, behind = {
        "words": ([5, 6, engine.eos], tokenizer.encode("\n<|im_start|>user\n")),
        "special token": ([5, start, 6], tokenizer.encode(" and")),
        "half a character": ([5, *half[:2]], [half[2], 6]),
    }[kind]
    decoded = []
    text_of = Spelling.text_of

    def counted(self: Spelling, ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return text_of(self, ids)

    monkeypatch.setattr(Spelling, "text_of", counted)
    prompt = tokenizer.encode(PROMPT)
    await client.give(prompt, sampled, "s")
    given = [*prompt, *sampled, *behind]
    answer = await client.give(given, [7, 8], "s")
    assert decoded == [len(prompt), len(behind) if kind == "words" else len(given)]
    (record,) = await client.records("s")
    assert (record["text"], record["exact"]) == (tokenizer.decode(given) + answer["text"], True)
    assert record["tokens"] == [*given, 7, 8]
    again = await client.retrieve(tokenizer.decode([*given, 7, 8]), session_id="s")
    assert (again["tokens"], again["exact"]) == (record["tokens"], True)
