"""The loss of a session or a text is remembered for ever, and nobody else's sample takes its place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from radix_cache.claims import (
    AS_IDS,
    NEXT,
    PROMPT,
    STREAMED,
    ask,
    assert_owned,
    in_pieces,
    session_of,
    trained,
)
from radix_cache.scripted import Client, ScriptedEngine, routed

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6], [7, 8]
SMALL = ("--radix-tree-max-size", "60", "--gc-threshold-k", "0")
#: Limits that let go of all that is older than a flood.
LIMITS = {
    "tokens": SMALL,
    "bytes": ("--radix-tree-max-bytes", "5400", "--gc-threshold-k", "0"),
    "versions": ("--gc-threshold-k", "1"),
}


@pytest.fixture
async def small(start: Start, engine: ScriptedEngine, checkpoint: str) -> AsyncIterator[Client]:
    async with routed(start, engine, checkpoint, *SMALL) as client:
        yield client


async def flood(client: Client) -> None:
    """Let everything go that was recorded before."""
    evictions = sum((await client.stats())["evictions"].values())
    engine = client.engine
    engine.meta["weight_version"] = f"{len(engine.asked)}"
    for number in range(3):
        await ask(client, f"{number} flood of words " * 20, [9, 10])
        engine.meta["weight_version"] = f"{len(engine.asked)}"
    del engine.meta["weight_version"]
    assert sum((await client.stats())["evictions"].values()) > evictions


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_session_that_lost_everything_stays_incomplete(
    start: Start, engine: ScriptedEngine, checkpoint: str, limit: str
) -> None:
    async with routed(start, engine, checkpoint, *LIMITS[limit]) as client:
        await ask(client, PROMPT, MINE, "a")
        assert (await session_of(client, "a"))["complete"]
        await flood(client)
        assert not (await session_of(client, "a"))["complete"]
        for number in range(2):
            await ask(client, f"again {number}", LAST, "a")
            assert not (await session_of(client, "a"))["complete"]
        await flood(client)
        await ask(client, "and again", LAST, "a")
        assert not (await session_of(client, "a"))["complete"]
        await ask(client, "another", LAST, "b")
        assert (await session_of(client, "b"))["complete"]


@AS_IDS
@pytest.mark.parametrize("other", ["b", ""], ids=["another", "nobody"])
async def test_a_session_that_lost_its_turn_inherits_nothing(small: Client, as_ids: bool, other: str) -> None:
    words, encode = in_pieces(small, "harbour"), small.engine.tokenizer.encode
    await ask(small, PROMPT, MINE, "a")
    await flood(small)
    await ask(small, PROMPT, words, other)
    prompt = PROMPT + "harbour" + NEXT
    await ask(small, encode(PROMPT) + words + encode(NEXT) if as_ids else prompt, LAST, "a")
    if not as_ids:
        assert small.engine.consumed[-1] == encode(prompt)
    await assert_owned(small, "a", prompt + small.engine.tokenizer.decode(LAST), LAST, never=words)


@pytest.mark.parametrize("other", ["b", ""], ids=["another", "nobody"])
async def test_a_lost_sample_is_not_replaced_by_a_twin(small: Client, other: str) -> None:
    words = in_pieces(small, "harbour")
    await ask(small, PROMPT, small.engine.tokenizer.encode("harbour"), "a")
    await flood(small)
    await ask(small, PROMPT, words, other)
    answer = await small.retrieve(PROMPT + "harbour", session_id="a")
    assert (answer["exact"], answer["inexact_reason"]) == (False, "evicted")
    assert trained(answer) == []
    assert (await small.retrieve(PROMPT + "harbour", session_id=other))["exact"]


@STREAMED
async def test_a_contradicted_sample_is_not_replaced_by_a_twin(client: Client, streamed: bool) -> None:
    words = in_pieces(client, "harbour")
    mine = client.engine.tokenizer.encode("harbour")
    client.engine.meta["completion_tokens"] = 9
    await ask(client, PROMPT, mine, "a", streamed=streamed)
    client.engine.meta.clear()
    await ask(client, PROMPT, words)
    answer = await client.retrieve(PROMPT + "harbour", session_id="a")
    assert (answer["exact"], answer["inexact_reason"]) == (False, "engine_contradicts_itself")
    assert set(words).isdisjoint(trained(answer))
    assert not (await session_of(client, "a"))["complete"]


@STREAMED
async def test_a_sample_without_ids_is_not_replaced_by_a_twin(client: Client, streamed: bool) -> None:
    words = in_pieces(client, "harbour")
    output = {"text": "harbour", "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"}}}
    body = orjson.dumps(output)
    if streamed:
        client.engine.media_type = "text/event-stream"
        body = b"data: %s\n\ndata: [DONE]\n\n" % body
    await ask(client, PROMPT, (200, body), "a", streamed=streamed)
    client.engine.media_type = "application/json"
    await ask(client, PROMPT, words)
    answer = await client.retrieve(PROMPT + "harbour", session_id="a")
    assert not answer["exact"]
    assert trained(answer) == []
    assert not (await session_of(client, "a"))["complete"]
    anybody = await client.retrieve(PROMPT + "harbour")
    assert (anybody["candidates"], anybody["candidates_relation"]) != (1, "eq")


async def test_three_twins_of_which_two_are_lost_are_three_or_at_least_one(small: Client) -> None:
    for words in (small.engine.tokenizer.encode("harbour"), in_pieces(small, "harbour")):
        await ask(small, PROMPT, words)
    await flood(small)
    await ask(small, PROMPT, small.engine.tokenizer.encode("har") + in_pieces(small, "bour"))
    answer = await small.retrieve(PROMPT + "harbour")
    if answer["candidates_relation"] == "eq":
        assert answer["candidates"] == 3
    else:
        assert answer["candidates_relation"] == "gte"
        assert 1 <= answer["candidates"] <= 3


async def test_candidates_are_counted_exactly_while_nothing_is_lost(client: Client) -> None:
    for words in (client.engine.tokenizer.encode("harbour"), in_pieces(client, "harbour")):
        await ask(client, PROMPT, words)
    answer = await client.retrieve(PROMPT + "harbour")
    assert (answer["candidates"], answer["candidates_relation"]) == (2, "eq")


@pytest.mark.parametrize("what", ["garbage", "no ids", "no events"])
async def test_an_answer_that_cannot_be_recorded_leaves_a_mark(client: Client, what: str) -> None:
    engine = client.engine
    await ask(client, PROMPT, MINE, "a")
    if what == "garbage":
        await ask(client, PROMPT, (200, b'{"text": "yes"'), "a")
    elif what == "no ids":
        await ask(client, PROMPT, (200, b'{"text": "yes", "meta_info": {"completion_tokens": 1}}'), "a")
    else:
        engine.media_type = "text/event-stream"
        await ask(client, PROMPT, (200, b"data: {nothing\n\ndata: [DONE]\n\n"), "a", streamed=True)
    assert not (await session_of(client, "a"))["complete"]


async def test_an_answer_without_a_token_is_no_loss(client: Client) -> None:
    aborted = {"text": "", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 0}}
    await ask(client, PROMPT, (200, orjson.dumps(aborted)), "a")
    await ask(client, PROMPT, MINE, "a")
    assert (await session_of(client, "a"))["complete"]


async def test_a_request_with_an_image_leaves_a_mark(client: Client) -> None:
    await ask(client, PROMPT, MINE, "a")
    await ask(client, PROMPT, LAST, "a", image_data="data:image/png;base64,")
    assert not (await session_of(client, "a"))["complete"]
    await ask(client, PROMPT, MINE, "b")
    assert (await session_of(client, "b"))["complete"]


async def test_a_generation_by_another_route_leaves_a_mark(client: Client) -> None:
    async def complete(_: Request) -> Response:
        return JSONResponse({"choices": [{"text": "yes"}]})

    client.engine.app.routes.insert(0, Route("/v1/{rest:path}", complete, methods=["POST"]))
    for session, path in (("a", "/v1/completions"), ("b", "/v1/chat/completions"), ("c", "/v1/models")):
        await ask(client, PROMPT, MINE, session)
        body = {"model": "m", "prompt": PROMPT, "messages": []}
        answer = await client.running.client.post(path, json=body, headers={"x-session-id": session})
        assert answer.status_code == 200
    assert not (await session_of(client, "a"))["complete"]
    assert not (await session_of(client, "b"))["complete"]
    assert (await session_of(client, "c"))["complete"]


Life = Callable[[], AbstractAsyncContextManager[Client]]


class TestRestart:
    @pytest.fixture
    def life(self, start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path) -> Life:
        """Routers with the same log, one after the other."""
        return partial(routed, start, engine, checkpoint, *SMALL, "--trajectory-log", str(tmp_path / "log"))

    async def test_a_loss_of_everything_outlives_a_restart(self, life: Life) -> None:
        async with life() as client:
            await ask(client, PROMPT, MINE, "a")
            await flood(client)
        async with life() as client:
            assert not (await session_of(client, "a"))["complete"]
            await ask(client, "again", LAST, "a")
            assert not (await session_of(client, "a"))["complete"]
        async with life() as client:
            assert not (await session_of(client, "a"))["complete"]
            await ask(client, "another", LAST, "b")
            assert (await session_of(client, "b"))["complete"]

    async def test_a_lost_text_outlives_a_restart(self, life: Life) -> None:
        async with life() as client:
            words = in_pieces(client, "harbour")
            await ask(client, PROMPT, client.engine.tokenizer.encode("harbour"), "a")
            await flood(client)
        async with life() as client:
            await ask(client, PROMPT, words)
            answer = await client.retrieve(PROMPT + "harbour", session_id="a")
            assert (answer["exact"], answer["inexact_reason"]) == (False, "evicted")
            assert trained(answer) == []
            anybody = await client.retrieve(PROMPT + "harbour")
            assert (anybody["candidates"], anybody["candidates_relation"]) != (1, "eq")
            await ask(client, PROMPT + "harbour" + NEXT, LAST, "a")
            assert client.engine.consumed[-1] == client.engine.tokenizer.encode(PROMPT + "harbour" + NEXT)

    async def test_an_unrecorded_answer_outlives_a_restart(self, life: Life) -> None:
        async with life() as client:
            await ask(client, PROMPT, (200, b'{"text": "yes", "meta_info": {"completion_tokens": 1}}'), "a")
            client.engine.meta["completion_tokens"] = 9
            await ask(client, PROMPT, MINE, "b")
            client.engine.meta.clear()
            await ask(client, PROMPT, LAST, "c", image_data="data:image/png;base64,")
        async with life() as client:
            for session in "abc":
                await ask(client, "again", LAST, session)
                assert not (await session_of(client, session))["complete"], session

    async def test_places_where_a_session_sampled_survive_a_restart(self, life: Life) -> None:
        """A session that has spoken at a place takes nobody's answer there, also when its own turn is far back."""
        async with life() as client:
            words = in_pieces(client, "harbour")
            await ask(client, "P", MINE, "a")
            await ask(client, "P", words, "b")
            for number in range(17):
                await ask(client, f"{number}", [5], "a")
        async with life() as client:
            await ask(client, "Pharbour and more", LAST, "a")
            assert client.engine.consumed[-1] == client.engine.tokenizer.encode("Pharbour and more")
