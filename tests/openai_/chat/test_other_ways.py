"""A session that asked by another way than a chat has spoken there, and goes on from no other one's turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.claims import ask, in_pieces, session_of, trained
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.scripted import Client, ScriptedEngine, routed
from radix_cache.shelf import ALL_DEMOTED, Shelf

if TYPE_CHECKING:
    from routers import Start

__all__ = ["checkpoint", "engine", "tokenizer"]

pytestmark = pytest.mark.anyio

HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "harbour"}


MEMORY = pytest.mark.parametrize("memory", [(), ALL_DEMOTED], ids=["kept", "demoted"])


async def chat(client: Client, sampled: list[int], session: str, *messages: Any, **more: Any) -> Any:
    client.engine.script.append(sampled)
    body = {"messages": messages, "session_id": session, "return_token_ids": True, **more}
    answer = await client.running.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@MEMORY
@pytest.mark.parametrize("way", ["text", "ids", "chat with ids"])
async def test_own_answer_is_not_replaced_by_an_equal_one(
    start: Start, engine: ScriptedEngine, checkpoint: str, way: str, memory: tuple[str, ...]
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai", *memory) as client:
        await chat(client, in_pieces(client, "harbour"), "b", HELLO)
        prompt = engine.consumed[-1]
        own = engine.tokenizer.encode("harbour")
        if way == "chat with ids":
            await chat(client, own, "a", {"role": "user", "content": "other words"}, input_ids=prompt)
        else:
            await ask(client, prompt if way == "ids" else engine.tokenizer.decode(prompt), own, "a")
        document = await chat(client, [7, 8], "a", HELLO, SAID, HELLO)
        assert document["history"] == "fresh"
        (record,) = (await session_of(client, "a"))["trajectories"]
        assert (record["exact"], trained(record)) == (True, [*own, 7, 8])


@MEMORY
async def test_a_turn_that_it_went_on_from_by_ids_is_gone_on_from_in_a_chat(
    start: Start, engine: ScriptedEngine, checkpoint: str, memory: tuple[str, ...]
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai", *memory) as client:
        words = in_pieces(client, "harbour")
        await chat(client, words, "b", HELLO)
        await ask(client, [*engine.consumed[-1], *words, 9], [5], "a")
        document = await chat(client, [7, 8], "a", HELLO, SAID, HELLO)
        assert document["history"] == "exact"
        records = (await session_of(client, "a"))["trajectories"]
        assert [trained(record) for record in records] == [[*words, 5], [*words, 7, 8]]


async def test_no_other_turn_is_gone_on_from_while_the_store_does_not_answer(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai", *ALL_DEMOTED) as client:
        await chat(client, in_pieces(client, "harbour"), "b", HELLO)
        shelf: Shelf = client.running.router.components.get("cold_store")
        shelf.is_closed = True
        document = await chat(client, [7, 8], "a", HELLO, SAID, HELLO)
        assert (document["history"], document["choices"][0]["exact"]) == ("fresh", False)
        shelf.is_closed = False
        document = await chat(client, [7, 8], "c", HELLO, SAID, HELLO)
        assert (document["history"], document["choices"][0]["exact"]) == ("exact", True)
