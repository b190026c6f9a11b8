"""Routed experts that a later router, or one beside it, finds in the store of the first."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S, until
from ports import free_port
from r3.replays import PROMPT, Replay, replaying
from r3.telling import base64_of, leaf_of, telling, turn
from r3.versioned import moved, versioned_experts
from router_core.errors import StartupError
from slime_engine.model import NgramModel
from store_flags import tier_flags

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
ROOM = ("--radix-tree-max-size", "100000", "--r3-max-bytes", "0")
NO_ROOM = ("--radix-tree-max-size", "1", "--r3-max-bytes", "1")
ORDER = ("radix_cache", "r3", "sessions")


def store_in(path: Path, tier: str = "ssd") -> tuple[str, ...]:
    """Flags of a store in ``path``, whose memory has one block."""
    memory = ("--middleware-paths", "slime_tiered_store", "--store-memory-bytes", "4096")
    return (*memory, *tier_flags(tier, path, 2 << 20))


async def demoted(replay: Replay) -> None:
    """Wait until memory has neither tokens nor rows, and the log says so."""
    cold = replay.running.router.components.get("ownership")
    rows = replay.running.router.components.get("token_rows").as_dict
    await until(lambda: not cold._trajectories.segments and not any(one["bytes"] for one in rows().values()))
    await cold._saver.writer.flush()


async def roll(replay: Replay) -> list[str]:
    """Two samples of a prompt, the first with two continuations. Returns the texts of all contexts."""
    first = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
    texts = [first, PROMPT + (await replay.generate(PROMPT, "t"))["text"]]
    for way in ("on", "back"):
        text = first + NEXT + way
        texts.append(text + (await replay.generate(text, "s", stream=True))[-1]["text"])
    return texts


async def read(replay: Replay, texts: Sequence[str]) -> list[Any]:
    """The records of ``texts``, whose experts are those of the engine."""
    return [await replay.check(text, "t" if text == texts[1] else "s") for text in texts]


async def reasons(replay: Replay, texts: Sequence[str]) -> list[str | None]:
    records = [await replay.retrieve(text, "t" if text == texts[1] else "s") for text in texts]
    assert all(record["exact"] for record in records)
    assert all((record["routed_experts"] is None) is not record["experts_exact"] for record in records)
    return [record["routed_experts_reason"] for record in records]


async def stored_bytes(replay: Replay) -> int:
    size: int = (await replay.stats())["routed_experts"]["stored_bytes"]
    return size


@pytest.mark.parametrize(("tier", "room"), [("ssd", ROOM), ("file", ROOM), ("ssd", NO_ROOM)])
async def test_stop_keeps_the_experts_of_all_samples(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, tier: str, room: tuple[str, ...]
) -> None:
    flags = (*room, *store_in(tmp_path / "store", tier))
    async with replaying(start, model, checkpoint, *flags, order=ORDER) as replay:
        texts = await roll(replay)
        before = await read(replay, texts)
    async with replaying(start, model, checkpoint, *flags, order=ORDER) as replay:
        assert await read(replay, texts) == before
        answer = (await replay.generate(texts[2] + NEXT, "s"))["meta_info"]
        assert answer["routed_experts_start_len"] == before[2]["token_length"] - 1  # the others are known
    async with replaying(start, model, checkpoint, *flags, order=ORDER) as replay:
        assert await read(replay, texts[:2]) == before[:2]
        for session in ("s", "t"):
            assert (await replay.running.client.delete(f"/sessions/{session}")).status_code == 204
        assert await stored_bytes(replay) == 0
        store = replay.running.router.components.get("cold_store")
        if tier == "ssd":  # else the first prompt stays, and the rows that earlier runs have written
            await until(lambda: not store.num_blocks)


async def test_kill_keeps_the_experts_of_demoted_samples(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    """Memory has room for all rows, but not for the tokens of the first samples."""
    room = ("--radix-tree-max-size", "60")
    async with replaying(start, model, checkpoint, *room, *store_in(tmp_path / "store")) as replay:
        texts = await roll(replay)
        cold = replay.running.router.components.get("ownership")
        await until(lambda: not cold._trajectories.overdue(1))
        await cold._saver.writer.flush()
        shutil.copytree(
            tmp_path / "store", tmp_path / "copy"
        )  # what another process would find after SIGKILL
    async with replaying(start, model, checkpoint, *room, *store_in(tmp_path / "copy")) as replay:
        found = [await replay.retrieve(text, "t" if text == texts[1] else "s") for text in texts]
        assert 0 < len([record for record in found if record["exact"]]) < len(texts)
        for record in found:
            if record["exact"]:
                replay.check_experts(record)
            else:
                assert record["routed_experts"] is None


async def test_experts_are_those_of_the_weights_that_sampled(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has other experts in each of three samples, so no two of them may be mixed up."""
    versioned_experts(monkeypatch)
    flags = (*NO_ROOM, *store_in(tmp_path / "store"))
    texts = []
    async with replaying(start, model, checkpoint, *flags) as replay:
        for version in (1, 2, 3):
            update = {"new_version": str(version), "abort_all_requests": False}
            await replay.running.client.post("/update_weight_version", json=update)
            texts.append(PROMPT + (await replay.generate(PROMPT, f"s{version}"))["text"])
    async with replaying(start, model, checkpoint, *flags) as replay:
        for version, text in enumerate(texts, 1):
            record = await replay.retrieve(text, f"s{version}")
            assert record["experts_exact"], record["routed_experts_reason"]
            assert moved(replay, record) == [version] * (record["token_length"] - 1)


async def test_router_without_experts_leaves_them_for_a_later_one(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*ROOM[:2], *store_in(tmp_path / "store"))
    async with replaying(start, model, checkpoint, *flags) as replay:
        texts = await roll(replay)
    without = ("radix_cache", "sessions")
    async with replaying(start, model, checkpoint, *flags, order=without) as replay:
        assert await reasons(replay, texts) == ["not_recorded"] * 4
        assert (await replay.running.client.delete("/sessions/t")).status_code == 204
    async with replaying(start, model, checkpoint, *flags) as replay:
        for text in (texts[0], *texts[2:]):
            await replay.check(text, "s")
        before = await stored_bytes(replay)
        turns = replay.running.router.components.get("token_rows")._rows["routed_experts"].turns
        assert (len(turns), before) == (3, sum(piece.nbytes for piece in turns._stored.values()))


@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_rows_whose_records_are_gone_have_a_reason(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, tier: str
) -> None:
    flags = (*NO_ROOM, *store_in(tmp_path / "store", tier))
    async with replaying(start, model, checkpoint, *flags) as replay:
        texts = await roll(replay)
        await demoted(replay)
        turns = replay.running.router.components.get("token_rows")._rows["routed_experts"].turns
        (last,) = turns._entries[max(turns._entries)].own
        replay.running.router.components.get("cold_store").forget(last.records.keys)
    stop, mark = ("--store-on-loss", "stop"), ("--store-on-loss", "mark")
    if tier == "ssd":
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        copy = (*NO_ROOM, *store_in(tmp_path / "copy"), *mark)
        async with replaying(start, model, checkpoint, *copy) as replay:
            assert await reasons(replay, texts) == [None, None, None, "not_in_store"]
        with pytest.raises(ExceptionGroup) as caught:
            async with replaying(start, model, checkpoint, *flags, *stop):
                pass
        assert caught.group_contains(StartupError, match=r" 1 of \d+ records of earlier runs are lost")
    async with replaying(start, model, checkpoint, *flags, *mark) as replay:
        lost = (await replay.running.client.get("/store")).json()["lost"]
        assert lost == (1 if tier == "ssd" else 0)
    async with replaying(start, model, checkpoint, *flags, *(stop if tier == "ssd" else mark)) as replay:
        reason = "not_in_store" if tier == "file" else "not_recorded"
        assert await reasons(replay, texts) == [None, None, None, reason]
        text = texts[3] + NEXT
        await replay.check(text + (await replay.generate(text, "s"))["text"], "s")  # it brings them again
    async with replaying(start, model, checkpoint, *flags) as replay:
        await read(replay, texts)


async def test_rows_that_the_router_dropped_are_not_missed_at_the_next_start(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*NO_ROOM, *store_in(tmp_path / "store"), "--store-on-loss", "stop")
    async with replaying(start, model, checkpoint, *flags) as replay:
        texts = await roll(replay)
        await demoted(replay)
        blocks = replay.running.router.components.get("cold_store").num_blocks
        turns = replay.running.router.components.get("token_rows")._rows["routed_experts"].turns
        turns.drop(max(turns._entries), "not_kept")
        await replay.running.router.components.get("ownership")._saver.writer.flush()
        assert replay.running.router.components.get("cold_store").num_blocks < blocks
    for _ in range(2):
        async with replaying(start, model, checkpoint, *flags) as replay:
            assert await reasons(replay, texts) == [None, None, None, "not_recorded"]


@asynccontextmanager
async def two_routers(
    start: Start, model: NgramModel, checkpoint: str, path: Path, room: tuple[str, ...] = NO_ROOM
) -> AsyncIterator[tuple[Replay, Replay]]:
    """Two routers with the same engines and the same remote store."""
    flags = (*room, *store_in(path, "file"))
    async with replaying(start, model, checkpoint, *flags, order=ORDER) as first:
        plugins = [word for name in ORDER for word in ("--plugin", name)]
        flags = (*plugins, "--hf-checkpoint", checkpoint, *flags, "--worker-urls", *first.urls)
        async with start(*flags) as running:
            await until(lambda: running.router.pool.healthy == 1)
            yield first, replace(first, running=running)


async def test_second_router_has_the_experts_of_the_first(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    async with two_routers(start, model, checkpoint, tmp_path / "store") as (first, second):
        texts = await roll(first)
        await demoted(first)
        before = await read(first, texts)
        found = await read(second, texts)
        wanted = [{**record, "candidates_relation": "gte"} for record in before]
        assert [{**record, "candidates_relation": "gte"} for record in found] == wanted
        text = texts[2] + NEXT
        answer = await second.generate(text, "s")
        assert answer["meta_info"]["routed_experts_start_len"] == before[2]["token_length"] - 1
        await demoted(second)
        await second.check(text + answer["text"], "s")
        await first.check(text + answer["text"], "s")  # one context with records of both


async def test_router_never_deletes_rows_that_another_one_needs(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    async with two_routers(start, model, checkpoint, tmp_path / "store") as (first, second):
        texts = await roll(first)
        await demoted(first)
        await read(second, texts)
        before = await stored_bytes(first)
        room = second.running.router.components.get("cold_store").num_blocks
        assert (await second.running.client.delete("/sessions/s")).status_code == 204
        assert second.running.router.components.get("cold_store").num_blocks < room
        await second.check(texts[1], "t")
        await second.running.router.components.get("ownership")._saver.writer.flush()
        # The rows of the prompt are in the same records as those of the deleted session.
        await first.check(texts[1], "t")
        assert 0 < await stored_bytes(first) < before


async def test_answer_without_rows_has_no_size_to_note(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*ROOM, *store_in(tmp_path / "store"))
    empty = {"indexer_topk": "", "indexer_topk_start_len": 9, "indexer_topk_num_layers": 3}
    async with telling(start, checkpoint, model, *flags) as (client, _):
        await turn(client, 10, empty, "s")
    async with telling(start, checkpoint, model, *flags) as (client, _):
        for tokens, session in ((10, "t"), (12, "u")):
            await turn(client, tokens, {"indexer_topk": base64_of(range((tokens - 1) * 6))}, session)
        path = "/trajectories/t?return_indexer_topk=true"
        (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
        assert leaf["indexer_topk_shape"] == [9, 6]


@pytest.mark.parametrize("content", [(None, 0, False, False, 3), (6, 9, True, False, 3, "later")])
async def test_router_starts_with_a_note_that_it_cannot_read(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, content: tuple[Any, ...],
) -> None:  # fmt: skip
    """Earlier versions wrote the first content: the number of layers without the size of a row."""
    flags = (*ROOM, *store_in(tmp_path / "store"))
    async with telling(start, checkpoint, model, *flags) as (client, _):
        rows = client.running.router.components.get("token_rows")._rows["indexer_topk"]
        rows._notes.add(None, "indexer_topk", content, ())
        for tokens, session in ((10, "s"), (12, "t")):
            await turn(client, tokens, {"routed_experts": base64_of(range((tokens - 1) * 6))}, session)
    async with telling(start, checkpoint, model, *flags) as (client, _):
        failures = (await client.stats())["demoted"]["failures"]
        assert failures == ({} if len(content) == 5 else {"rows": 1})
        assert ("rows indexer_topk stay unknown" in caplog.text) is bool(failures)
        leaf = await leaf_of(client, "s")
        assert leaf["routed_experts"] == base64_of(range(9 * 6))


@pytest.mark.parametrize("contradicted", [False, True])
async def test_size_of_a_row_is_known_again(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, contradicted: bool
) -> None:
    flags = (*ROOM, *store_in(tmp_path / "store"))
    async with telling(start, checkpoint, model, *flags) as (client, _):
        for tokens, session in ((10, "s"), (12, "t")):  # the second answer confirms the size of a row
            meta = {"indexer_topk": base64_of(range((tokens - 1) * 6)), "indexer_topk_num_layers": 3}
            await turn(client, tokens, meta, session)
        if contradicted:
            await turn(client, 10, {"indexer_topk": base64_of(range(9 * 5))}, "u")
    async with telling(start, checkpoint, model, *flags) as (client, _):
        path = "/trajectories/s?return_indexer_topk=true"
        (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
        wanted = ("sizes_disagree", None) if contradicted else (None, [9, 3, 2])
        assert (leaf["indexer_topk_reason"], leaf["indexer_topk_shape"]) == wanted
        assert leaf["indexer_topk"] == (None if contradicted else base64_of(range(9 * 6)))


async def test_rows_of_another_shape_are_refused(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    flags = (*ROOM, *store_in(tmp_path / "store"))
    meta = {"routed_experts": base64_of(range(9 * 6))}
    for shape, reason in (("3 2", None), ("4 2", "mis_sized"), ("3 2", None)):
        flag = ("--r3-shape", *shape.split())
        async with telling(start, checkpoint, model, *flag, *flags) as (client, _):
            if not (await client.running.client.get("/trajectories/s")).is_success:
                await turn(client, 10, meta, "s")
            path = "/trajectories/s?return_routed_experts=true"
            (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
            assert (leaf["routed_experts_reason"], leaf["exact"]) == (reason, True)


async def test_experts_stay_on_the_disk_when_a_larger_remote_store_is_added(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    disk = store_in(tmp_path / "disk")
    async with replaying(start, model, checkpoint, *ROOM, *disk) as replay:
        texts = await roll(replay)
    remote = store_in(tmp_path / "remote", "file")[-2:]
    async with replaying(start, model, checkpoint, *ROOM, *disk, *remote) as replay:
        await read(replay, texts)


async def test_rows_without_a_confirmed_size_gain_no_trust_from_another_shape(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    """The middle run confirms rows of eight values, the first one had six, which may be truncated."""
    flags = (*ROOM, *store_in(tmp_path / "store"))
    path = "/trajectories/s?return_routed_experts=true"
    reasons = []
    for shape, told in (((), "s"), (("--r3-shape", "4", "2"), "u"), ((), None)):
        async with telling(start, checkpoint, model, *shape, *flags) as (client, _):
            if told is not None:
                await turn(client, 10, {"routed_experts": base64_of(range(9 * (8 if shape else 6)))}, told)
            (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
            reasons.append(leaf["routed_experts_reason"])
    assert reasons == ["shape_unknown", "mis_sized", "mis_sized"]


@pytest.mark.skipif(
    "SLIME_ROUTER_KILL_TEST" not in os.environ, reason="it starts three processes: set SLIME_ROUTER_KILL_TEST"
)
@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_processes_are_killed_and_stopped(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, tier: str
) -> None:
    """The engines, and the checks, are those of a router without a store."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        replaying(start, model, checkpoint) as replay,
        httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
    ):
        process = replace(replay, running=replace(replay.running, client=client))
        plugins = ["radix_cache", "r3", "tiered_store"]
        flags = [word for name in plugins for word in ("--plugin", name)]
        flags += ["--port", str(port), "--hf-checkpoint", checkpoint, "--worker-urls", *replay.urls, *NO_ROOM]
        program = Program([*flags, *store_in(tmp_path / "store", tier)[2:]], tmp_path / "router.log")
        try:
            await program.serve(client)
            texts = await roll(process)
            with anyio.fail_after(HANG_S):
                while (await process.stats())["routed_experts"]["bytes"]:
                    pass
            await anyio.sleep(0.5)  # tokens are demoted, and the last note is written
            program.kill()
            await program.serve(client)
            before = await read(process, texts)
            program.send(signal.SIGTERM)
            await until(lambda: program.ended)
            await program.serve(client)
            assert await read(process, texts) == before
        finally:
            program.kill()
