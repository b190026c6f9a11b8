"""A router whose memory has room for nothing, and a store that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import anyio
import pytest

from deadlines import until
from radix_cache.direct import generate
from radix_cache.scripted import Client, ScriptedEngine, bits, routed
from radix_cache.shelf import Shelf
from radix_cache.toy import sampled, trajectories
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.limits import Limits

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
SMALL = ("--middleware-paths", "radix_cache.shelf", "--radix-tree-max-size", "1")


@pytest.fixture
async def cold(start: Start, engine: ScriptedEngine, checkpoint: str) -> AsyncIterator[Client]:
    async with routed(start, engine, checkpoint, *SMALL, "--plugin", "sessions") as client:
        yield client


def shelf_of(client: Client) -> Shelf:
    shelf: Shelf = client.running.router.components.get("cold_store")
    return shelf


async def is_empty(client: Client) -> None:
    """Wait until all is demoted."""
    cold: ColdTrajectories = client.running.router.components.get("ownership")
    await until(lambda: not cold._trajectories.segments)


async def test_demoted_answer_is_retrieved_bit_for_bit(cold: Client) -> None:
    answer = await cold.generate(PROMPT, [70, 71, 72, cold.engine.eos], session="s")
    tokens, mask, logprobs = cold.last()
    await is_empty(cold)
    found = await cold.retrieve(PROMPT + answer["text"], session_id="s")
    assert (found["tokens"], found["loss_mask"], bits(found["rollout_logp"])) == (tokens, mask, logprobs)
    assert found["exact"]
    await is_empty(cold)
    (record,) = await cold.records("s")
    assert (record["tokens"], record["candidates"], record["exact"]) == (tokens, 1, True)
    await is_empty(cold)
    await cold.generate(PROMPT + answer["text"] + "<|im_end|>\n", [80], session="s")
    assert cold.engine.consumed[-1][: len(tokens)] == tokens
    stats = await cold.stats()
    assert not stats["evictions"]
    assert stats["demoted"]["promotions"] >= 6


async def test_session_routes_promote(cold: Client) -> None:
    await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    shown = (await cold.running.client.get("/sessions/s")).json()
    assert len(shown["records"]) == 1
    assert shown["metadata"]["complete"]
    await is_empty(cold)
    page = cold.running.router.components.get("session_list").page("", 0, 10)
    assert [(one.name, one.responses, one.tokens, one.is_complete) for one in page.sessions] == [
        ("s", 1, 2, True)
    ]
    assert (await cold.running.client.delete("/sessions/s")).status_code == 204
    await until(lambda: not shelf_of(cold).records)
    assert (await cold.running.client.get("/trajectories/s")).status_code == 404


async def test_retrieval_says_that_the_store_does_not_answer(cold: Client) -> None:
    answer = await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    shelf_of(cold).is_closed = True
    body = {"text": PROMPT + answer["text"], "session_id": "s"}
    for reply in (
        await cold.running.client.post("/retrieve_from_text", json=body),
        await cold.running.client.get("/trajectories/s"),
        await cold.running.client.get("/sessions/s"),
    ):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "STORE_FAILED"
        assert "the shelf is closed" in reply.json()["error"]["message"]
    shelf_of(cold).is_closed = False
    assert (await cold.retrieve(**body))["exact"]


async def test_generation_goes_on_unrecorded_while_the_store_does_not_answer(cold: Client) -> None:
    await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    shelf_of(cold).is_closed = True
    cold.engine.script.append([90])
    body = {"text": PROMPT + "x", "session_id": "s"}
    reply = await cold.running.client.post("/generate", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-slime-exact"] == "false"
    shelf_of(cold).is_closed = False
    assert not (await cold.running.client.get("/trajectories/s")).json()["complete"]


async def test_what_cannot_be_kept_is_marked_and_counted(cold: Client) -> None:
    shelf = shelf_of(cold)
    shelf.refuses, shelf.wait_s = True, 0.2
    answer = await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    stats = await cold.stats()
    assert stats["evictions"] == {"not_kept": 2}
    assert stats["demoted"]["failures"]["lost"] == 1
    found = await cold.retrieve(PROMPT + answer["text"], session_id="s")
    assert (found["exact"], found["inexact_reason"]) == (False, "evicted")
    shelf.refuses = False
    await cold.generate(PROMPT, [70, 72], session="s")
    assert not (await cold.running.client.get("/trajectories/s")).json()["complete"]


async def test_text_of_a_record_that_the_store_lost_is_evicted(cold: Client) -> None:
    answer = await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    shelf_of(cold).records.clear()
    found = await cold.retrieve(PROMPT + answer["text"], session_id="s")
    assert (found["exact"], found["inexact_reason"]) == (False, "evicted")
    assert (found["candidates"], found["candidates_relation"]) == (1, "gte")
    assert (await cold.stats())["evictions"] == {"not_in_store": 2}
    assert (await cold.retrieve(PROMPT + "other words"))["inexact_reason"] == "uncovered_text"


async def test_failed_write_is_repeated(cold: Client) -> None:
    shelf = shelf_of(cold)
    shelf.refuses = True
    answer = await cold.generate(PROMPT, [70, 71], session="s")
    await until(lambda: shelf.refused > 0)
    shelf.refuses = False
    await is_empty(cold)
    assert (await cold.retrieve(PROMPT + answer["text"], session_id="s"))["exact"]
    assert not (await cold.stats())["evictions"]


async def test_requests_wait_while_the_store_is_behind(cold: Client) -> None:
    shelf = shelf_of(cold)
    shelf.refuses = True
    await cold.generate(PROMPT, [70, 71], session="s")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cold.generate, PROMPT, [72], "t")
        waiting: ColdTrajectories = cold.running.router.components.get("ownership")
        await until(lambda: waiting._waits > 0)
        assert len(cold.engine.sampled) == 1
        shelf.refuses = False
    assert len(cold.engine.sampled) == 2
    assert not (await cold.stats())["evictions"]


async def test_store_that_takes_nothing_does_not_end_the_run() -> None:
    """The end would lose all that is in memory, too."""
    kept = trajectories(Limits(tokens=1))
    cold = ColdTrajectories(kept)
    shelf = Shelf(wait_s=0.1, stops_on_loss=True)
    shelf.refuses = True
    await cold.open(shelf, "toy")
    generate(kept, "a", sampled(2), "s")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cold.run)
        await until(lambda: kept.has_lost("s"))
        assert set(kept.evicted) == {"not_kept"}
        await cold.load_session("s")
        tasks.cancel_scope.cancel()


async def test_session_of_a_lost_record_is_known(cold: Client) -> None:
    """A prompt has no session of its own: the session is that of its answer."""
    await cold.generate(PROMPT, [70, 71], session="s")
    await is_empty(cold)
    store = shelf_of(cold)
    assert [store.session_of(key) for key in store.records] == ["s", "s"]
    assert store.session_of(b"k" * 16) is None
