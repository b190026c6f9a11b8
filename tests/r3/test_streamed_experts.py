"""Experts that are read, from memory and from the store, while the answer is sent."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest
import safetensors.numpy

from deadlines import until
from r3.recording import EXPERTS, SHELVED, always, on_disk, overwrite_blocks, recorded_by, recording
from r3.replays import PROMPT, replaying, rows_in
from radix_cache.scripted import Client
from radix_cache.shelf import Shelf
from slime_engine.model import NgramModel
from slime_r3 import pieces
from slime_rows import streamed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
JSON, MSGPACK = "application/json", "application/x-msgpack"
NPZ, SAFETENSORS = "application/octet-stream", "application/x-safetensors"


@asynccontextmanager
async def begun(client: Client, question: dict[str, Any]) -> AsyncIterator[httpx.Response]:
    """An answer in JSON, of which the first bytes have been read. The rest is larger than the buffers on its way."""
    async with client.running.client.stream("POST", "/retrieve_from_text", json=question) as reply:
        assert reply.status_code == 200
        assert "content-length" not in reply.headers
        yield reply


async def asked(client: Client, question: dict[str, Any], accept: str = NPZ) -> httpx.Response:
    return await client.running.client.post("/retrieve_from_text", json=question, headers={"accept": accept})


@pytest.mark.parametrize("is_whole", [True, False])
async def test_forks_have_their_rows_from_memory_and_disk_in_each_format(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *,
    is_whole: bool,
) -> None:  # fmt: skip
    """Short answers are sent as a whole. Others begin with the first record, here of six rows."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 36)
    if not is_whole:
        monkeypatch.setattr(streamed, "_HELD_BYTES", 1)
    async with replaying(start, model, checkpoint, *on_disk(tmp_path)) as replay:
        first = PROMPT + (await replay.generate(PROMPT, "s"))["text"] + NEXT
        turns = recorded_by(replay).turns
        await until(lambda: not turns.size_bytes)
        turns.memory.max_bytes = 0  # later rows stay in memory
        for way in ("a", "b"):
            await replay.generate(first + way, "s")
        await replay.generate(first + "c", "s", return_routed_experts=False)
        assert turns.size_bytes > 0 < turns.stored_bytes

        async def read(accept: str, query: str = "") -> bytes:
            path = f"/trajectories/s?return_routed_experts=true{query}"
            reply = await replay.running.client.get(path, headers={"accept": accept})
            assert ("content-length" in reply.headers) is (is_whole or accept == SAFETENSORS)
            assert reply.headers["content-type"] == accept
            return reply.content

        leaves = httpx.Response(200, content=await read(JSON)).json()["trajectories"]
        assert [leaf["routed_experts_reason"] for leaf in leaves] == [None, None, "not_told"]
        wanted = [replay.rows(leaf["tokens"]).tolist() for leaf in leaves[:2]]
        assert [rows_in(leaf[EXPERTS]).tolist() for leaf in leaves[:2]] == wanted
        as_npy = httpx.Response(200, content=await read(JSON, "&routed_experts_format=npy")).json()
        files = [base64.b64decode(leaf[EXPERTS]) for leaf in as_npy["trajectories"][:2]]
        assert [np.load(BytesIO(file)).tolist() for file in files] == wanted
        with np.load(BytesIO(await read(NPZ))) as file:
            ends = file["experts_offsets"].tolist()
            assert ends == [0, len(wanted[0]), len(wanted[0] + wanted[1]), len(wanted[0] + wanted[1])]
            assert file[EXPERTS].tolist() == wanted[0] + wanted[1]
            assert file["tokens"].tolist() == [token for leaf in leaves for token in leaf["tokens"]]
        packed = msgpack.unpackb(await read(MSGPACK))["trajectories"]
        values = [np.frombuffer(leaf[EXPERTS]["data"], leaf[EXPERTS]["dtype"]) for leaf in packed[:2]]
        assert [one.tolist() for one in values] == [np.ravel(one).tolist() for one in wanted]
        assert EXPERTS not in packed[2]
        tensors = safetensors.numpy.load(await read(SAFETENSORS))
        assert [tensors[f"{EXPERTS}.{number}"].tolist() for number in range(2)] == wanted
        assert f"{EXPERTS}.2" not in tensors


@pytest.mark.parametrize("is_cold", [False, True])
async def test_rows_are_not_held_twice(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, *, is_cold: bool
) -> None:
    """A sample of 19 MB is sent with 12 MiB of further memory at most, the client's included."""
    flags = on_disk(tmp_path, 32 << 20) if is_cold else ()
    async with recording(start, model, checkpoint, 60, 1 << 18, *flags) as (client, question, told):
        assert told.nbytes > 18_000_000
        size = 0
        tracemalloc.start()
        request = client.running.client.stream(
            "POST", "/retrieve_from_text", json=question, headers={"accept": NPZ}
        )
        async with request as reply:
            async for some in reply.aiter_raw():
                size += len(some)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size > told.nbytes
        assert peak < 12 << 20


async def test_leaving_client_frees_its_experts_and_a_slow_one_gets_all_of_them(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is deleted meanwhile: the rows stay in the store until the slow client has them."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    flags = ("--plugin", "sessions", *SHELVED)
    async with recording(start, model, checkpoint, 60, 1 << 16, *flags) as (client, question, told):
        shelf: Shelf = client.running.router.components.get("cold_store")
        held = recorded_by(client).turns._stored.values()
        users = [piece.users for piece in held]
        async with begun(client, question):
            assert [piece.users for piece in held] == [number + 1 for number in users]
        await until(lambda: [piece.users for piece in held] == users)
        async with begun(client, question) as reply:
            assert (await client.running.client.delete("/sessions/s")).status_code == 204
            assert len(shelf.records) >= len(told) >> 16
            body = await reply.aread()
        found = base64.b64decode(httpx.Response(200, content=body).json()[EXPERTS])
        assert np.array_equal(np.frombuffer(found, "<i4"), told)
        await until(lambda: not shelf.records)
        assert recorded_by(client).turns.stored_bytes == 0


async def test_answer_breaks_off_if_the_store_fails_meanwhile(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    async with recording(start, model, checkpoint, 60, 1 << 16, *SHELVED) as (client, question, told):
        shelf: Shelf = client.running.router.components.get("cold_store")
        async with begun(client, question) as reply:
            shelf.is_closed = True
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                await reply.aread()
        assert "an answer broke off: the store of recorded rows does not answer" in caplog.text
        for accept in (JSON, MSGPACK, NPZ, SAFETENSORS):
            refused = await asked(client, question, accept)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "STORE_FAILED")
        with monkeypatch.context() as patched:
            patched.setattr(shelf, "holds", always)  # only the first read fails
            assert (await asked(client, question)).status_code == 503
        shelf.is_closed = False
        with np.load(BytesIO((await asked(client, question)).content)) as file:
            assert np.array_equal(file[EXPERTS].reshape(-1), told)


async def test_experts_break_off_if_the_disk_lost_rows_and_the_next_say_so(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 16)
    flags = on_disk(tmp_path, 16 << 20)
    async with recording(start, model, checkpoint, 60, 1 << 16, *flags) as (client, question, _):
        async with begun(client, question) as reply:
            overwrite_blocks(tmp_path)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                await reply.aread()
        assert "an answer broke off: its routed_experts are not_in_store" in caplog.text
        answer = (await asked(client, question, JSON)).json()
        assert (answer["exact"], answer["experts_exact"]) == (True, False)
        assert (answer["routed_experts_reason"], answer[EXPERTS]) == ("not_in_store", None)


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_rows_that_are_lost_before_the_answer_begins_have_a_reason(
    start: Start, model: NgramModel, checkpoint: str, monkeypatch: pytest.MonkeyPatch, *, is_noticed: bool
) -> None:
    """The store has lost the last record; it has noticed that, or has not."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 1 << 10)
    async with recording(start, model, checkpoint, 20, 1 << 10, *SHELVED) as (client, question, _):
        shelf: Shelf = client.running.router.components.get("cold_store")
        if not is_noticed:
            monkeypatch.setattr(shelf, "holds", always)
        piece = [*recorded_by(client).turns._stored.values()][-1]
        del shelf.records[piece.records.keys[-1]]
        with np.load(BytesIO((await asked(client, question)).content)) as file:
            about = httpx.Response(200, content=file["about"].tobytes()).json()
            assert (about["exact"], about["routed_experts_reason"]) == (True, "not_in_store")
            assert EXPERTS not in file
