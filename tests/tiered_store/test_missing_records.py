"""Records that are missing in a store that routers share: a router has deleted them, or they are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from deadlines import until
from radix_cache.scripted import Client, ScriptedEngine, routed
from slime_engine.tokenizer import EngineTokenizer
from slime_radix_cache.demotion import others
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.errors import StoreError, TierFailed
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tiers.settings import TierSettings, open_tiers
from store_flags import tier_flags

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
KEY = b"k" * 16


@asynccontextmanager
async def shared_records(
    path: Path, was_deleted: Callable[[bytes], Awaitable[bool]]
) -> AsyncIterator[ColdRecords]:
    """Records in a remote store whose memory has room for one block. One record is known, but missing."""
    tier_flags("file", path)
    tiers = await open_tiers(TierSettings(memory_bytes=LAYOUT.block_bytes, remote=path.as_uri()), 4032)
    kept = ColdRecords(wait_s=1.0, stops_on_loss=True)
    kept.was_deleted = was_deleted
    async with TieredStore(LAYOUT, tiers.memory, remote=tiers.remote) as store:
        assert tiers.remote is not None
        with kept.kept_in(store, [tiers.memory, tiers.remote], tiers.logs):
            kept.learn({KEY: 100})
            yield kept
    await tiers.aclose()


async def missing(kept: ColdRecords) -> int:
    """Fetch and read the missing record. Returns the number of losses."""
    assert await kept.fetch([KEY]) == [None]
    assert not await kept.read(KEY, memoryview(bytearray(100)))
    return kept.losses.count


async def test_missing_record_is_lost_if_no_note_says_that_it_was_deleted(tmp_path: Path) -> None:
    async def was_deleted(key: bytes) -> bool:
        return False

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        assert await missing(kept) == 2


async def test_deleted_record_is_not_lost(tmp_path: Path) -> None:
    async def was_deleted(key: bytes) -> bool:
        return key == KEY

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        assert await missing(kept) == 0


async def test_record_that_is_deleted_before_the_second_read_is_not_lost(tmp_path: Path) -> None:
    answers = [False, True] * 2

    async def was_deleted(key: bytes) -> bool:
        return answers.pop(0)

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        assert await missing(kept) == 0
    assert not answers


async def test_record_that_is_forgotten_here_meanwhile_is_not_lost(tmp_path: Path) -> None:
    async def was_deleted(key: bytes) -> bool:
        kept.forget([key])
        return False

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        assert await kept.fetch([KEY]) == [None]
        assert kept.losses.count == 0


async def test_record_that_comes_while_notes_are_read_is_found(tmp_path: Path) -> None:
    async def was_deleted(key: bytes) -> bool:
        async with shared_records(tmp_path / "remote", was_deleted) as other:
            await other.keep([(KEY, b"x" * 100)])
        return False

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        assert await kept.fetch([KEY]) == [b"x" * 100]
        assert kept.losses.count == 0


@pytest.mark.parametrize(
    "error", [TierFailed("notes", "read", "file:///", OSError("away")), ValueError("damaged")]
)
async def test_record_is_not_lost_if_the_notes_cannot_be_read(tmp_path: Path, error: Exception) -> None:
    async def was_deleted(key: bytes) -> bool:
        raise error

    async with shared_records(tmp_path / "remote", was_deleted) as kept:
        with pytest.raises(StoreError, match=r"away|damaged"):
            await kept.fetch([KEY])
        with pytest.raises(StoreError, match=r"away|damaged"):
            await kept.read(KEY, memoryview(bytearray(100)))
        assert kept.losses.count == 0


# Two routers.


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags of routers that stop at a loss, and read each other's notes only when they need them."""
    monkeypatch.setattr(others, "_EVERY_S", 1000.0)
    router = (
        "--middleware-paths",
        "slime_tiered_store",
        "--radix-tree-max-size",
        "1",
        "--plugin",
        "sessions",
    )
    store = ("--store-memory-bytes", str(LAYOUT.block_bytes), "--store-on-loss", "stop")
    return (*router, *store, *tier_flags("file", tmp_path / "remote"))


@asynccontextmanager
async def two_routers(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, flags: tuple[str, ...]
) -> AsyncIterator[tuple[Client, Client, str]]:
    """Two routers with one store, and the text of an answer of the session ``s``, which both know."""
    engine = ScriptedEngine(tokenizer)
    async with (
        routed(start, engine, checkpoint, *flags) as first,
        routed(start, engine, checkpoint, *flags) as second,
    ):
        text = PROMPT + (await first.generate(PROMPT, [70, 71], session="s"))["text"]
        await demoted(first)
        assert (await second.retrieve(text, session_id="s"))["exact"]
        await demoted(second)
        yield first, second, text


async def demoted(client: Client) -> None:
    """Wait until all is in the store, and all notes are written."""
    cold = client.running.router.components.get("ownership")
    await until(lambda: not cold._trajectories.segments)
    await cold._saver.writer.flush()


async def shown(client: Client) -> dict[str, Any]:
    document: dict[str, Any] = (await client.running.client.get("/store")).json()
    return document


async def test_router_does_not_stop_for_a_record_that_another_one_has_deleted(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    async with two_routers(start, tokenizer, checkpoint, flags) as (first, second, text):
        assert (await first.running.client.delete("/sessions/s")).status_code == 204
        await first.running.router.components.get("ownership")._saver.writer.flush()
        blocks = tmp_path / "remote"
        await until(lambda: len([*blocks.glob("??/*")]) == 1)  # the prompt stays
        second.engine.script.append([90])
        body = {"text": text + "<|im_end|>\n", "session_id": "s"}
        assert (await second.running.client.post("/generate", json=body)).status_code == 200
        assert (await shown(second))["lost"] == 0
        assert not (await second.running.client.get("/trajectories/s")).json()["complete"]


async def test_router_stops_for_a_record_that_another_one_wrote_and_that_is_lost(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, flags: tuple[str, ...], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async with two_routers(start, tokenizer, checkpoint, flags) as (_, second, text):
        second.running.router.components.get("cold_store").tiers[0][0].reset()  # memory
        for block in (tmp_path / "remote").glob("??/*"):
            block.unlink()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_ask, second, text)
            await until(lambda: "was kept, and no tier has it intact; start the router again" in caplog.text)
            tasks.cancel_scope.cancel()


async def _ask(client: Client, text: str) -> None:
    with suppress(httpx.TransportError):  # the router may end before it answers
        await client.running.client.post("/retrieve_from_text", json={"text": text})
