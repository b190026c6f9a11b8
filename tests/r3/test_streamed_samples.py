"""Samples of a session whose experts are read, from memory and from the store, while they are sent."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from deadlines import until
from r3.recording import EXPERTS, SHELVED, always, on_disk, overwrite_blocks, recorded_by, recording
from r3.replays import PROMPT, Replay, replaying
from radix_cache.scripted import Client
from radix_cache.shelf import Shelf
from slime_engine.model import NgramModel
from slime_r3 import pieces
from slime_rows import streamed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
NAME = f"rollout_{EXPERTS}"
SESSIONS = ("--plugin", "sessions")


def tensors_of(reply: httpx.Response) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tensors of a reply, which is byte for byte the file that the library safetensors makes; and its samples."""
    assert reply.status_code == 200, reply.text
    assert int(reply.headers["content-length"]) == len(reply.content)
    tensors = safetensors.numpy.load(reply.content)
    assert safetensors.numpy.save(tensors) == reply.content
    return tensors, json.loads(tensors["_samples_meta"].tobytes())["samples"]


async def samples(client: Client | Replay, **body: Any) -> httpx.Response:
    return await client.running.client.post("/sessions/s/samples", json=body)


@asynccontextmanager
async def begun(client: Client) -> AsyncIterator[httpx.Response]:
    """Samples of which the first bytes have been read. The rest is larger than the buffers on its way."""
    async with client.running.client.stream("POST", "/sessions/s/samples") as reply:
        assert reply.status_code == 200
        assert int(reply.headers["content-length"]) > 8 << 20
        yield reply


async def rest_of(reply: httpx.Response) -> Any:
    return safetensors.numpy.load(await reply.aread())[f"{NAME}.0"].reshape(-1)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_forks_and_cut_samples_have_their_rows_from_memory_and_disk(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *,
    is_whole: bool,
) -> None:  # fmt: skip
    """A record has six rows, which leaves share. Samples are cut at each place of a turn, within records too."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 36)
    if not is_whole:
        monkeypatch.setattr(streamed, "_HELD_BYTES", 1)
    order = ("radix_cache", "r3", "sessions")
    async with replaying(start, model, checkpoint, *on_disk(tmp_path), order=order) as replay:
        ends: dict[str, Any] = {"sampling_params": {"max_new_tokens": 2000}}  # with EOS
        first = PROMPT + (await replay.generate(PROMPT, "s", rid="first", **ends))["text"] + NEXT
        turns = recorded_by(replay).turns
        await until(lambda: not turns.size_bytes)
        turns.memory.max_bytes = 0  # later rows stay in memory
        for way in "ab":
            await replay.generate(first + way, "s", rid=way, **ends)
        await replay.generate(first + "c", "s", rid="c", return_routed_experts=False, **ends)
        assert turns.size_bytes > 0 < turns.stored_bytes
        contexts = {}
        for rid in ("first", "a", "b", "c"):
            (entry,) = replay.journal(rid)
            contexts[rid] = [*entry["input_ids"], *entry["output_ids"]]
        tensors, about = tensors_of(await samples(replay, include_retries=True))
        reasons = [one["metadata"]["routed_experts_reason"] for one in about]
        assert reasons == ["not_told", None, None]
        assert f"{NAME}.0" not in tensors
        for number, rid in enumerate("cba"):
            assert tensors[f"tokens.{number}"].tolist() == contexts[rid]
        for number in (1, 2):
            rows = tensors[f"{NAME}.{number}"]
            assert (rows.dtype, rows.tolist()) == (np.int32, replay.rows(contexts["cba"[number]]).tolist())
        ends_of_turns = [len(contexts[rid]) for rid in ("first", "a")]
        for longest in (end - cut for end in ends_of_turns for cut in (7, 4, 1)):
            tensors, about = tensors_of(await samples(replay, max_seq_len=longest, include_retries=True))
            for number, one in enumerate(about):
                tokens = tensors[f"tokens.{number}"].tolist()
                assert tokens in [context[: len(tokens)] for context in contexts.values()]
                if one["metadata"]["experts_exact"]:
                    assert tensors[f"{NAME}.{number}"].tolist() == replay.rows(tokens).tolist()
            assert (len(tokens), one["metadata"]["experts_exact"]) == (longest, True)


@pytest.mark.parametrize("is_cold", [False, True])
async def test_rows_are_never_held_as_a_whole(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, *, is_cold: bool
) -> None:
    """Rows of 9 MB, which are 38 MB as int32, are sent with 16 MiB of further memory, the client's included."""
    flags = (*SESSIONS, *on_disk(tmp_path, 32 << 20)) if is_cold else SESSIONS
    async with recording(start, model, checkpoint, 60, 1 << 17, *flags) as (client, _, told):
        size = 0
        tracemalloc.start()
        async with begun(client) as reply:
            async for some in reply.aiter_raw():
                size += len(some)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size == int(reply.headers["content-length"]) > 4 * told.nbytes > 36_000_000
        assert peak < 16 << 20


async def test_leaving_client_frees_its_samples_and_a_slow_one_gets_all_of_them(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is continued and deleted meanwhile: the rows stay in the store until the slow client has them."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    async with recording(start, model, checkpoint, 60, 1 << 16, *SESSIONS, *SHELVED) as (
        client,
        question,
        told,
    ):
        shelf: Shelf = client.running.router.components.get("cold_store")
        held = recorded_by(client).turns._stored.values()
        users = [piece.users for piece in held]
        async with begun(client):
            assert [piece.users for piece in held] == [number + 1 for number in users]
        await until(lambda: [piece.users for piece in held] == users)
        async with begun(client) as reply:
            await client.generate(question["text"], [5, 6], session="s")
            assert (await client.running.client.delete("/sessions/s")).status_code == 204
            assert len(shelf.records) >= len(told) >> 16
            assert np.array_equal(await rest_of(reply), told)
        await until(lambda: not shelf.records)
        assert recorded_by(client).turns.stored_bytes == 0


async def test_rows_that_leave_memory_meanwhile_are_sent(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    """They are dropped, since there is no store."""
    async with recording(start, model, checkpoint, 60, 1 << 16, *SESSIONS) as (client, _, told):
        turns = recorded_by(client).turns
        async with begun(client) as reply:
            turns.memory.max_bytes = 1
            turns.memory.make_room()
            assert not turns.size_bytes
            assert np.array_equal(await rest_of(reply), told)
        _, (about,) = tensors_of(await samples(client))
        assert about["metadata"]["routed_experts_reason"] == "dropped"
        assert NAME in about["nulls"]


async def test_answer_breaks_off_if_the_store_fails_meanwhile(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    async with recording(start, model, checkpoint, 60, 1 << 16, *SESSIONS, *SHELVED) as (client, _, told):
        shelf: Shelf = client.running.router.components.get("cold_store")
        async with begun(client) as reply:
            shelf.is_closed = True
            with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
                await reply.aread()
        assert "an answer broke off: the store of recorded rows does not answer" in caplog.text
        refused = await samples(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "STORE_FAILED")
        with monkeypatch.context() as patched:
            patched.setattr(shelf, "holds", always)  # only the first read fails
            assert (await samples(client)).status_code == 503
        shelf.is_closed = False
        tensors, _ = tensors_of(await samples(client))
        assert np.array_equal(tensors[f"{NAME}.0"].reshape(-1), told)


async def test_samples_break_off_if_the_disk_lost_rows_and_the_next_say_so(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    flags = (*SESSIONS, *on_disk(tmp_path, 16 << 20))
    async with recording(start, model, checkpoint, 60, 1 << 16, *flags) as (client, _, _):
        async with begun(client) as reply:
            overwrite_blocks(tmp_path)
            with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
                await reply.aread()
        assert f"an answer broke off: its {EXPERTS} are not_in_store" in caplog.text
        tensors, (about,) = tensors_of(await samples(client))
        assert about["metadata"]["routed_experts_reason"] == "not_in_store"
        assert f"{NAME}.0" not in tensors


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_rows_that_are_lost_before_the_answer_begins_have_a_reason(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch, *, is_noticed: bool
) -> None:
    """The store has lost the last record; it has noticed that, or has not."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 10)
    async with recording(start, model, checkpoint, 20, 1 << 10, *SESSIONS, *SHELVED) as (client, _, _):
        shelf: Shelf = client.running.router.components.get("cold_store")
        if not is_noticed:
            monkeypatch.setattr(shelf, "holds", always)
        piece = [*recorded_by(client).turns._stored.values()][-1]
        del shelf.records[piece.records.keys[-1]]
        tensors, (about,) = tensors_of(await samples(client))
        assert about["metadata"]["experts_exact"] is False
        assert about["metadata"]["routed_experts_reason"] == "not_in_store"
        assert f"{NAME}.0" not in tensors
        assert about["nulls"] == [NAME, "rollout_indexer_topk"]
