"""The memory that a large answer costs while it passes; nothing of it stays."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest
from starlette.responses import StreamingResponse

from radix_cache.scripted import Client, ScriptedEngine
from router_core.exchange import Exchange
from router_core.reply import Reply
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_radix_cache.capture.recorder import StreamRecorder
from slime_radix_cache.capture.relayed_answer import RelayedAnswer
from slime_sglang.array_cutter import ArrayCutter
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SIZE = 60 * MIB


def with_experts(text: str) -> bytes:
    """One token, and SIZE bytes of routed experts, in JSON that nobody would encode so again."""
    return (
        b'{ "odd" : "\\u00e9\\/", "twice":1, "twice":2,"meta_info":{"finish_reason":  { "type": "length","length":1} ,'
        b'"number": 1.50e+00,\t"output_token_logprobs": [[-0.50, 7, null]], "completion_tokens": 1,\r\n'
        b'"routed_experts": "%b", "e2e_latency":-0.0}, "output_ids": [ 7 ],  "text": %b}\n'
    ) % (b"A" * SIZE, orjson.dumps(text))


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
@pytest.mark.parametrize(("plugins", "kept"), [((), 0), (("--plugin", "r3"), SIZE * 3 // 4 // 4)])
async def test_pitfall_27_a_large_answer_passes_byte_for_byte_and_is_never_whole(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, plugins: tuple[str, ...], kept: int
) -> None:
    """On the command's own event loop: asyncio's would copy what waits to be written.

    The plugin r3 keeps a byte of each value, once for all samples of a prompt.
    """
    answer = with_experts(tokenizer.decode([7]))
    narrow = kept

    engine = LargeEngine()
    engine.large = [answer, answer]
    flags = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint, *plugins)
    async with serving(engine.app) as url, start(*flags, "--worker-urls", url) as running:
        tracemalloc.start()
        try:
            for _ in range(2):
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                size = 0
                body = {"text": "a", "return_routed_experts": True}
                async with running.client.stream("POST", "/generate", json=body) as reply:
                    async for piece in reply.aiter_raw():
                        assert piece == memoryview(answer)[size : size + len(piece)]
                        size += len(piece)
                after, peak = tracemalloc.get_traced_memory()
                assert size == len(answer)
                assert peak - before < SIZE / 2 + narrow
                assert after - before < 4 * MIB + kept
                kept = 0  # once for all samples
        finally:
            tracemalloc.stop()
        stats = (await running.client.get("/cache_stats")).json()
        assert (stats["entries"], stats["unrecorded"]) == (3, {})  # a prompt, and a sample of each request


class LargeEngine(FakeEngine):
    """An engine that sends each of its ``large`` answers in pieces, and breaks off after ``sent`` bytes of one.

    ``hold``: it waits for this before the last piece.
    """

    def __init__(self) -> None:
        super().__init__()
        self.large: list[bytes] = []
        self.sent = 1 << 40
        self.rest = self._next

    def _next(self, _: object) -> StreamingResponse:
        answer = self.large.pop(0)
        length = {"content-length": str(len(answer))}
        return StreamingResponse(self._pieces(answer), headers=length, media_type="application/json")

    async def _pieces(self, answer: bytes) -> AsyncIterator[bytes]:
        for begin in range(0, len(answer), MIB):
            if begin >= self.sent:
                raise OSError("as asked")
            if self.hold is not None and begin + MIB >= len(answer):
                await self.hold.wait()
            yield answer[begin : begin + MIB]


@asynccontextmanager
async def large(start: Start, checkpoint: str, *flags: str) -> AsyncIterator[tuple[LargeEngine, Running]]:
    engine = LargeEngine()
    async with (
        serving(engine.app) as url,
        start(
            *(*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint),
            *("--worker-urls", url, *flags),
        ) as running,
    ):
        yield engine, running


def answer_of(text: str, *, size: int = 4 * MIB, **meta: Any) -> bytes:
    known = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
    }
    told = {"text": text, "output_ids": [7], "meta_info": {**known, **meta, "routed_experts": "A" * size}}
    return orjson.dumps(told)


ASK = {"text": "a", "session_id": "s", "return_routed_experts": True}


@pytest.mark.parametrize("prompt", ["text", "ids"])
async def test_a_large_answer_is_recorded_when_its_last_piece_comes(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, prompt: str
) -> None:
    text = tokenizer.decode([7])
    ask = ASK if prompt == "text" else {"input_ids": tokenizer.encode("a"), "session_id": "s"}
    async with large(start, checkpoint) as (engine, running):
        engine.large = [answer_of(text)]
        engine.hold = anyio.Event()
        async with running.client.stream("POST", "/generate", json=ask) as reply:
            assert reply.headers["content-length"] == str(len(answer_of(text)))
            whole = b""
            async for piece in reply.aiter_raw():
                whole += piece
                engine.hold.set()  # it has begun to come before the engine has sent all
                if len(whole) == len(answer_of(text)):
                    break
            assert whole == answer_of(text)
            asked = {"text": "a" + text, "session_id": "s"}
            got = (await running.client.post("/retrieve_from_text", json=asked)).json()
        assert (got["exact"], got["tokens"][-1], got["rollout_logp"][-1]) == (True, 7, -0.5)


async def test_session_of_a_large_answer_stands_in_the_log_while_it_is_told(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    """A kill would leave a client with the text, and no record of it."""
    flags = ("--trajectory-log", str(tmp_path / "log"))
    async with large(start, checkpoint, *flags) as (engine, running):
        plugins: dict[str, Any] = dict(running.router.hooks.pre_request)
        free = plugins["radix_cache"].__self__._log.unfinished._file._free
        before = len(free)
        engine.large = [answer_of(tokenizer.decode([7]))]
        engine.hold = anyio.Event()
        async with running.client.stream("POST", "/generate", json=ASK) as reply:
            pieces = reply.aiter_raw()
            await anext(pieces)
            assert len(free) == before - 1
            engine.hold.set()
            async for _ in pieces:
                pass
        await running.client.get("/cache_stats")  # by then the request has ended
        assert len(free) == before


async def test_a_large_aborted_answer_is_tried_again(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    text = tokenizer.decode([7])
    aborted = answer_of(text, finish_reason={"type": "abort", "message": "paused"})
    async with large(start, checkpoint, "--abort-retry-wait-s", "0") as (engine, running):
        engine.large = [aborted, answer_of(text)]
        reply = (await running.client.post("/generate", json=ASK)).json()
        assert engine.large == []
        assert reply["output_ids"] == [7]
        assert reply["meta_info"]["finish_reason"]["type"] == "length"


async def test_large_answer_that_breaks_off_counts_as_lost(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    async with large(start, checkpoint) as (engine, running):
        engine.large = [answer_of(tokenizer.decode([7]))]
        engine.sent = 2 * MIB
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.post("/generate", json=ASK)
        stats = (await running.client.get("/cache_stats")).json()
        assert stats["entries"] == 0
        assert stats["lost"]["sessions"]["marks"] == 1


async def test_large_answer_that_is_no_json_is_passed_on_and_counted(start: Start, checkpoint: str) -> None:
    wrong = b'{"text":"b","meta_info":{"finish_reason":{"type":"length","length":1},' + b" " * 2 * MIB
    async with large(start, checkpoint) as (engine, running):
        engine.large = [wrong]
        reply = await running.client.post("/generate", json=ASK)
        assert reply.content == wrong
        stats = (await running.client.get("/cache_stats")).json()
        assert stats["unrecorded"] == {"answer_not_understood": 1}
        told = (await running.client.post("/retrieve_from_text", json={"text": ASK["text"]})).json()
        assert told["candidates"] == 1  # the lost answer


async def test_cancelled_record_of_a_large_answer_is_not_lost_twice() -> None:
    class Body:
        finished = True

        async def read(self) -> bytes:
            return b"{}"

        def close(self) -> None:
            pass

    async def never(_: ArrayCutter) -> None:
        await anyio.sleep_forever()

    lost: list[str] = []
    cutter = ArrayCutter(keeps=False)
    answer = RelayedAnswer(Body(), cutter, never, lambda: lost.append("at the end"), lambda _: None)
    answer.relay()
    with anyio.move_on_after(0):
        await answer.read()
    answer.close()
    assert lost == []  # its recording has marked it


async def test_failure_to_decode_a_large_answer_does_not_reach_the_client(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: ArrayCutter, piece: bytes | memoryview) -> None:
        raise MemoryError

    monkeypatch.setattr(ArrayCutter, "feed", failing)
    answer = answer_of(tokenizer.decode([7]))
    async with large(start, checkpoint) as (engine, running):
        engine.large = [answer]
        assert (await running.client.post("/generate", json=ASK)).content == answer
        stats = (await running.client.get("/cache_stats")).json()
        assert stats["unrecorded"] == {"answer_not_understood": 1}
        assert stats["lost"]["sessions"]["marks"] == 1


async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    client: Client, engine: ScriptedEngine
) -> None:
    """Neither whole answers nor streams, nor those that are tried again or fail."""
    gc.collect()
    gc.disable()
    try:
        for turn in range(3):
            await client.generate(f"a{turn}", [7, 8, engine.eos], "s")
            await client.generate(f"b{turn}", [7, 8, 9], stream=False, rid=f"r{turn}")
            engine.script += [[7, 8, 9], (400, b'{"error":{"message":"no"}}')]
            body = {"text": f"c{turn}", "stream": True}
            assert (await client.running.client.post("/generate", json=body)).text.endswith("[DONE]\n\n")
            assert (await client.running.client.post("/generate", json={"text": "d"})).status_code == 400
        left = [one for one in gc.get_objects() if isinstance(one, Exchange | Reply | StreamRecorder)]
    finally:
        gc.enable()
    assert left == []
