"""A session has spoken where it asked with the same tokens, also by a text that the tokenizer normalises to another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from radix_cache.claims import ask, session_of, trained
from radix_cache.scripted import Client, ScriptedEngine, routed
from radix_cache.tokens.vocabularies import VOCABULARIES
from slime_engine.tokenizer import EngineTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start

pytestmark = pytest.mark.anyio

#: Not in NFC: what its tokens say is another text.
WRITTEN = "cafe\u0301 says: "
MINE, LAST = [300, 301], [302, 303]


@pytest.fixture
async def client(start: Start, tmp_path: Path) -> AsyncIterator[Client]:
    (vocabulary,) = (one for one in VOCABULARIES if one.name == "qwen")
    tokenizer, checkpoint = vocabulary.make(tmp_path)
    engine = ScriptedEngine(EngineTokenizer(tokenizer.backend_tokenizer))
    async with routed(start, engine, checkpoint) as client:
        yield client


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "unanswered"])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids and then text", "text and then ids"])
async def test_what_another_one_sampled_there_is_not_its_own(
    client: Client, as_ids: bool, is_answered: bool
) -> None:
    tokenizer = client.engine.tokenizer
    word = [token for letter in "harbour" for token in tokenizer.encode(letter)]
    await ask(client, WRITTEN, word, "b")
    ids = client.engine.consumed[-1]
    assert tokenizer.decode(ids) != WRITTEN
    if is_answered:
        await ask(client, ids if as_ids else WRITTEN, MINE, "a")
    else:
        client.engine.script.append((500, b"{}"))
        body = {"input_ids": ids} if as_ids else {"text": WRITTEN}
        await client.running.client.post("/generate", json=body, headers={"x-session-id": "a"})
    await ask(client, f"{WRITTEN}harbour\n" if as_ids else [*ids, *word, 310], LAST, "a")
    records = (await session_of(client, "a"))["trajectories"]
    assert [trained(record) for record in records] == [MINE, LAST][not is_answered :]
    assert all(record["exact"] for record in records)


async def test_a_session_goes_on_in_what_it_forked_by_text_and_by_ids(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    word = [token for letter in "harbour" for token in tokenizer.encode(letter)]
    await ask(client, WRITTEN, word, "b")
    given = [*client.engine.consumed[-1], *word, 310]
    await ask(client, given, MINE, "a")
    await ask(client, f"{WRITTEN}harbour{tokenizer.decode([310])} more", LAST, "a")
    records = (await session_of(client, "a"))["trajectories"]
    assert [trained(record) for record in records] == [[*word, *MINE], [*word, *LAST]]
