"""The plugin in a router: memory has room for nothing, and all answers are exact."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from deadlines import until
from metrics.scrapes import scraped
from radix_cache.scripted import Client, ScriptedEngine, bits, routed
from router_core.cli import build
from router_core.errors import MissingComponent, SettingsError, StartupError
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_tiered_store.cold_records import LAYOUT
from slime_tiered_store.tiers.ssd.directory import Layout as SsdLayout
from store_flags import tier_flags

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
STORE = ("--middleware-paths", "slime_tiered_store", "--radix-tree-max-size", "1")


async def demoted(client: Client) -> dict[str, Any]:
    """Wait until all is demoted; returns ``GET /store``."""
    kept = client.running.router.components.get("ownership")._trajectories
    await until(lambda: not kept.segments)
    shown: dict[str, Any] = (await client.running.client.get("/store")).json()
    return shown


@pytest.mark.parametrize("tiers", ["memory", "ssd", "file"])
async def test_answers_come_back_from_each_tier(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, tiers: str
) -> None:
    flags: tuple[str, ...] = ("--store-memory-bytes", str(1 << 20))
    if tiers == "ssd":
        flags = ("--store-memory-bytes", "4096", "--store-ssd", str(tmp_path / "disk"))
        flags += ("--store-ssd-bytes", str(1 << 20))
    elif tiers == "file":
        (tmp_path / "shared").mkdir()
        flags = ("--store-memory-bytes", "4096", "--store-remote", f"file://{tmp_path / 'shared'}")
    engine = ScriptedEngine(tokenizer)
    async with routed(start, engine, checkpoint, *STORE, "--plugin", "metrics", *flags) as client:
        answers = []
        for number in range(5):
            ids = [70 + number, 71, *range(80, 80 + 40 * number), engine.eos]
            answers.append((await client.generate(PROMPT, ids, session=f"s{number}"), client.last()))
        shown = await demoted(client)
        assert shown["records"] == 6  # with the prompt
        for number, (answer, (tokens, mask, logprobs)) in enumerate(answers):
            found = await client.retrieve(PROMPT + answer["text"], session_id=f"s{number}")
            assert (found["tokens"], found["loss_mask"]) == (tokens, mask)
            assert bits(found["rollout_logp"]) == logprobs
            assert (found["exact"], found["candidates"]) == (True, 1)
        name = {"memory": "memory", "ssd": "ssd", "file": "remote"}[tiers]
        tier = (await demoted(client))["tiers"][name]
        assert tier["blocks"] >= 6
        metrics = (await client.running.client.get("/metrics")).text
        assert f'slime_store_blocks{{tier="{name}"}} {tier["blocks"]}' in metrics
        assert "slime_store_records 6" in metrics
        if tiers == "memory":
            assert tier["hits"] > 0
        else:
            assert tier["demotions"] == 6
            assert 0 < tier["promotions"] <= tier["hits"] == tier["read_blocks"]
            assert tier["waits"] == tier["errors"] == 0


async def test_each_number_of_each_tier_is_a_metric(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*tier_flags("ssd", tmp_path / "disk"), *tier_flags("file", tmp_path / "remote"))
    flags = (*STORE, "--plugin", "metrics", *flags)
    gauges = {"capacity": "capacity_blocks", "is_failing": "failing"}
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        await client.generate(PROMPT, [70, 71], session="s")
        shown = await demoted(client)
        metrics = await scraped(client.running.client)
        assert list(shown["tiers"]) == ["memory", "ssd", "remote"]
        for name, numbers in shown["tiers"].items():
            assert numbers.keys() == shown["tiers"]["ssd"].keys()
            for key, number in numbers.items():
                is_gauge = key in (*gauges, "blocks", "bytes", "pending_bytes")
                metric = gauges.get(key, key.replace("waited_s", "waited_seconds"))
                series = f"slime_store_{metric}" + ("" if is_gauge else "_total"), f"tier={name}"
                assert key == "last_error" or metrics[series] == number, series
        assert metrics["slime_store_record_blocks", ""] == shown["record_blocks"] == 2
        # memory has no calls that fail or wait
        assert not any(shown["tiers"]["memory"][key] for key in ("waits", "errors", "missing", "is_failing"))


async def test_tier_that_fails_is_a_metric(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*STORE, "--plugin", "metrics", *tier_flags("ssd", tmp_path / "disk"))
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        _, tier = client.running.router.components.get("cold_store").tiers[1]
        tier.counts.failed(OSError("no answer"), "read")
        metrics = await scraped(client.running.client)
        assert metrics["slime_store_failing", "tier=ssd"] == 1
        assert metrics["slime_store_failing", "tier=memory"] == 0


def small_disk(path: Path, slots: int, *, on_loss: str) -> tuple[str, ...]:
    """Flags of a disk with room for so few blocks, one of them spare, and of a memory with room for one."""
    size = SsdLayout(LAYOUT.block_bytes, slots).total_bytes
    disk = ("--store-ssd", str(path / "disk"), "--store-ssd-bytes", str(size), "--store-on-loss", on_loss)
    return "--store-memory-bytes", str(LAYOUT.block_bytes), "--store-keep-secs", "0.1", *disk


@pytest.mark.parametrize("on_loss", ["mark", "stop"])
async def test_full_disk_marks_what_it_has_no_room_for_and_keeps_the_rest(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, on_loss: str
) -> None:
    flags = (*STORE, *small_disk(tmp_path, 5, on_loss=on_loss))
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        texts = [
            PROMPT + (await client.generate(PROMPT, [70 + number, 71], session=f"s{number}"))["text"]
            for number in range(5)
        ]
        shown = await demoted(client)
        assert (shown["records"], shown["lost"]) == (4, 0)
        assert shown["waits"] >= 2
        assert (await client.stats())["evictions"] == {"not_kept": 2}
        found = [await client.retrieve(text, session_id=f"s{number}") for number, text in enumerate(texts)]
        assert [one["inexact_reason"] for one in found] == [None, None, None, "evicted", "evicted"]


@pytest.mark.parametrize("home", ["ssd", "remote"])
@pytest.mark.parametrize("on_loss", ["mark", "stop"])
async def test_record_that_is_in_no_tier_any_more_is_an_error(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, on_loss: str, home: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = (*STORE, "--plugin", "metrics", *small_disk(tmp_path, 9, on_loss=on_loss))
    flags += ("--store-keep-secs", "60")  # a busy disk takes longer than the 0.1 s of the other tests
    if home == "remote":
        flags += tier_flags("file", tmp_path / "remote")
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        text = PROMPT + (await client.generate(PROMPT, [70, 71], session="s"))["text"]
        await demoted(client)
        client.running.router.components.get("cold_store").tiers[0][0].reset()  # memory
        for block in (tmp_path / "remote").glob("??/*"):
            block.unlink()
        blocks = tmp_path / "disk" / "blocks"
        blocks.write_bytes(bytes(blocks.stat().st_size))
        if on_loss == "mark":
            found = await client.retrieve(text, session_id="s")
            assert (found["exact"], found["inexact_reason"]) == (False, "evicted")
            assert (await demoted(client))["lost"] == 2
            assert "slime_store_lost_total 2" in (await client.running.client.get("/metrics")).text
        else:
            with suppress(httpx.TransportError):  # the router may end before it answers
                await client.running.client.post("/retrieve_from_text", json={"text": text})
            await until(lambda: "--store-on-loss mark" in caplog.text)
    assert "of session 's' was kept, and no tier has it intact" in caplog.text
    assert ("the application ends: the store has lost" in caplog.text) is (on_loss == "stop")


@pytest.mark.parametrize("on_loss", ["mark", "stop"])
async def test_record_with_a_damaged_content_is_lost(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, on_loss: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = (*STORE, *small_disk(tmp_path, 9, on_loss=on_loss), "--store-keep-secs", "60")
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        text = PROMPT + (await client.generate(PROMPT, [70, 71], session="s"))["text"]
        await demoted(client)
        records = client.running.router.components.get("cold_store")
        last = max(records._blocks)  # the answer
        (content,) = await records.fetch([last])
        records.forget([last])
        await records.keep([(last, content[:-1] + bytes([content[-1] ^ 1]))])
        if on_loss == "mark":
            found = await client.retrieve(text, session_id="s")
            assert (found["exact"], found["inexact_reason"]) == (False, "evicted")
            assert (await demoted(client))["lost"] == 1
        else:
            with suppress(httpx.TransportError):  # the router may end before it answers
                await client.running.client.post("/retrieve_from_text", json={"text": text})
            await until(lambda: "--store-on-loss mark" in caplog.text)
    assert f"the record {last.hex()} of session 's' was kept, and is damaged" in caplog.text


async def test_records_that_are_missing_at_a_start_are_marked_or_end_the_start(
    start: Start,
    tokenizer: EngineTokenizer,
    checkpoint: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags = (*STORE, "--plugin", "sessions", *tier_flags("ssd", tmp_path / "disk"), "--store-on-loss")
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags, "stop") as client:
        for name in ("deleted", "s"):
            await client.generate(PROMPT + name, [70, 71], session=name)
        await demoted(client)
        assert (await client.running.client.delete("/sessions/deleted")).status_code == 204
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags, "stop") as client:
        assert (await demoted(client))["lost"] == 0
        number = (await demoted(client))["records"]
    for file in (tmp_path / "disk").iterdir():
        if file.is_file():  # the notes stay
            file.unlink()
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags, "stop"):
                pass
        error: BaseException = caught.value
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, StartupError)
        message = str(error)
        assert f"{tmp_path / 'disk'}: {number} of {number} records of earlier runs are lost" in message
        assert "--store-on-loss mark" in message
    caplog.clear()
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags, "mark") as client:
        assert (await demoted(client))["lost"] == number
        assert (await client.running.client.get("/trajectories/s")).status_code == 404
    assert caplog.text.count("records of earlier runs are lost") == 1
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags, "stop") as client:
        assert (await demoted(client))["lost"] == 0


@pytest.mark.parametrize("away", ["a", "b"])
async def test_directory_that_is_not_mounted_ends_the_start_and_costs_nothing(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, away: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The notes are in the directory ``a``."""
    _, paths, *size = tier_flags("ssd", tmp_path / "a")
    flags = (*STORE, "--store-ssd", f"{paths},{tmp_path / 'b'}", *size, "--store-memory-bytes", "4096")
    engine = ScriptedEngine(tokenizer)
    async with routed(start, engine, checkpoint, *flags) as client:
        for number in range(4):
            await client.generate(PROMPT, [70 + number, 71], session=f"s{number}")
        await demoted(client)
    (tmp_path / away).rename(tmp_path / "away")
    with pytest.raises(ExceptionGroup) as caught:
        async with routed(start, engine, checkpoint, *flags):
            pass
    said = (
        "records of earlier runs are lost"
        if away == "b"
        else "blocks of earlier runs, and no notes about them"
    )
    assert caught.group_contains(StartupError, match=f"{said}.*--store-on-loss mark")
    shutil.rmtree(tmp_path / away)
    (tmp_path / "away").rename(tmp_path / away)
    async with routed(start, engine, checkpoint, *flags) as client:
        assert (await demoted(client))["lost"] == 0
        for number in range(4):
            leaf = (await client.running.client.get(f"/trajectories/s{number}")).json()
            assert leaf["complete"]
    shutil.rmtree(tmp_path / away)
    async with routed(start, engine, checkpoint, *flags, "--store-on-loss", "mark") as client:
        assert (await demoted(client))["lost"] >= 1
    assert said in caplog.text


async def test_store_and_log_together_are_refused(checkpoint: str, tmp_path: Path) -> None:
    log = ("--trajectory-log", str(tmp_path / "log"))
    with pytest.raises(StartupError, match="cannot be combined with --trajectory-log"):
        build([*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint, *STORE, *log])


async def test_store_needs_something_to_keep() -> None:
    with pytest.raises(MissingComponent, match="--plugin radix_cache"):
        build([*BARE, "--middleware-paths", "slime_tiered_store"])


@pytest.mark.parametrize(
    "flags", [("--store-keep-secs", "0"), ("--store-on-loss", "hope"), ("--store-eviction", "random")]
)
async def test_wrong_flags_are_refused(checkpoint: str, flags: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=flags[0]):
        build([*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint, *STORE, *flags])


async def test_wait_of_writes_is_that_of_the_flag(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    flags = (*STORE, "--store-wait-secs", "7")
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        assert client.running.router.components.get("cold_store").store._wait_s == 7


async def test_policy_of_eviction_is_that_of_the_flag(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    disk = tier_flags("ssd", tmp_path / "disk")
    flags = (*STORE, *disk, *tier_flags("file", tmp_path / "remote"), "--store-eviction", "filo")
    async with routed(start, ScriptedEngine(tokenizer), checkpoint, *flags) as client:
        for number in range(3):
            await client.generate(PROMPT, [70 + number, 71], session=f"s{number}")
        await demoted(client)
        for engine, _ in client.running.router.components.get("cold_store").tiers[:2]:
            nodes = engine.index._evictable._nodes
            assert engine.index._evictable.first().created == max(node.created for node in nodes)
            assert len(nodes) > 1
