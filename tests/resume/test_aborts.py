"""Aborted generations with embedded engines: done again or continued, held against their journals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from radix_cache.scripted import ScriptedEngine, bits, routed

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class AbortedRollouts:
    """A router with one embedded engine, and what a client and a trainer do with them."""

    def __init__(self, running: Running, engine: str) -> None:
        self.running = running
        self.client = running.client
        self.engine = engine

    async def generate(self, rid: str, **parameters: Any) -> dict[str, Any]:
        body = {"text": PROMPT, "rid": rid, "sampling_params": {"ignore_eos": True, **parameters}}
        answer = await self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def through(self, path: str, body: dict[str, Any]) -> None:
        """Send a trainer's call to the engines by way of the router."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text

    async def events(self, rid: str, **parameters: Any) -> list[dict[str, Any]]:
        body = {
            "text": PROMPT,
            "rid": rid,
            "stream": True,
            "sampling_params": {"ignore_eos": True, **parameters},
        }
        async with self.client.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200
            lines = [line[6:] async for line in reply.aiter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [orjson.loads(line) for line in lines[:-1]]

    async def direct(self, path: str, body: dict[str, Any]) -> None:
        """Send a trainer's call to the engine itself: the router does not hear of it."""
        answer = await self.client.post(self.engine + path, json=body)
        assert answer.status_code == 200, answer.text

    async def journal(self, rid: str) -> list[dict[str, Any]]:
        answer = await self.client.get(f"{self.engine}/journal", params={"rid": rid})
        entries: list[dict[str, Any]] = answer.json()["entries"]
        return entries

    async def retrieve(self, text: str) -> dict[str, Any]:
        answer = await self.client.post("/retrieve_from_text", json={"text": PROMPT + text})
        document: dict[str, Any] = answer.json()
        return document

    async def nothing_held(self) -> None:
        """Return when no worker is leased and no connection to one is busy."""
        router = self.running.router
        while True:
            if not router.proxy.busy_connections and not any(worker.in_flight for worker in router.pool):
                return
            await anyio.sleep(0.005)

    async def abort(self, rid: str, tokens: int = 5, attempt: int = 1) -> None:
        """The engine gives a generation up by itself."""
        await self.sampled(rid, tokens, attempt)
        await self.direct("/abort_request", {"rid": rid})

    async def sampled(self, rid: str, tokens: int, attempt: int = 1) -> None:
        """Return when the engine has sampled so many tokens in that attempt."""
        while True:
            entries = await self.journal(rid)
            if len(entries) >= attempt and len(entries[attempt - 1]["output_ids"]) >= tokens:
                return
            await anyio.sleep(0.005)

    async def update_weights(self, rid: str, version: str, tokens: int = 5, attempt: int = 1) -> None:
        """Abort everything in the middle of a generation, and load other weights."""
        await self.sampled(rid, tokens, attempt)
        await self.direct("/pause_generation", {"mode": "abort"})
        await self.direct("/update_weights_from_disk", {"model_path": "/m", "weight_version": version})
        await self.direct("/continue_generation", {})


@asynccontextmanager
async def rollouts(start: Start, *flags: str) -> AsyncIterator[AbortedRollouts]:
    engine = [
        "--plugin",
        "engine",
        "--engine-workers",
        "1",
        "--engine-tokens-per-second",
        "100",
        "--engine-seed",
        "3",
    ]
    async with start(*engine, "--plugin", "radix_cache", *flags) as running:
        urls = (await running.client.get("/list_workers")).json()["urls"]
        yield AbortedRollouts(running, urls[0])


def ids_of(entries: list[dict[str, Any]]) -> list[int]:
    return [one for entry in entries for one in entry["output_ids"]]


def assert_joined(answer: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """``answer`` has what the journal has in these entries, in order, each of which went on from the one before."""
    meta = answer["meta_info"]
    prompt = entries[0]["input_ids"]
    sampled: list[int] = []
    for entry in entries:
        assert entry["input_ids"] == prompt + sampled
        sampled += entry["output_ids"]
    assert answer["output_ids"] == sampled
    assert [one for _, one, _ in meta["output_token_logprobs"]] == sampled
    logprobs = [one for entry in entries for one in entry["output_logprobs"]]
    assert bits([one for one, _, _ in meta["output_token_logprobs"]]) == bits(logprobs)
    versions = [one for entry in entries for one in entry["output_versions"]]
    spans = meta.get("weight_versions", [{"version": versions[0], "start": 0, "end": len(versions)}])
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == versions
    assert meta["weight_version"] == versions[-1]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), len(sampled))
    assert meta["output_token_logprobs_length"] == len(sampled)


async def test_a_resumed_generation_is_one_response(start: Start) -> None:
    async with rollouts(start, "--resume-aborted") as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.update_weights, "r", "7")
        answer = await rollout.generate("r", max_new_tokens=30)
        entries = await rollout.journal("r")
        kept = await rollout.client.post("/retrieve_from_text", json={"text": PROMPT + answer["text"]})
        stats = (await rollout.client.get("/cache_stats")).json()
    assert (stats["aborts"], stats["unrecorded"]) == ({"resumed": 1}, {})
    assert len(entries) == 2
    assert_joined(answer, entries)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["default", "7"]
    assert answer["meta_info"]["e2e_latency"] >= 0.28
    assert kept.json()["exact"]
    assert kept.json()["candidates"] == 1
    assert kept.json()["tokens"] == entries[0]["input_ids"] + answer["output_ids"]
    assert kept.json()["generation_versions"][-30:] == [
        version for entry in entries for version in entry["output_versions"]
    ]


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_a_resumed_stream_is_one_stream(start: Start, incremental: bool) -> None:
    flags = ["--engine-incremental-streaming-output"] if incremental else []
    async with rollouts(start, *flags, "--resume-aborted") as rollout, anyio.create_task_group() as tasks:

        async def train() -> None:
            await rollout.update_weights("r", "7")
            await rollout.update_weights("r", "8", attempt=2)

        tasks.start_soon(train)
        events = await rollout.events("r", max_new_tokens=30)
        entries = await rollout.journal("r")
        text = "".join(event["text"] for event in events) if incremental else events[-1]["text"]
        kept = await rollout.retrieve(text)
    assert len(entries) == 3
    whole = events[-1]
    if incremental:
        whole["output_ids"] = [one for event in events for one in event["output_ids"]]
        whole["meta_info"]["output_token_logprobs"] = [
            one for event in events for one in event["meta_info"]["output_token_logprobs"]
        ]
    assert_joined(whole, entries)
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    assert {event["meta_info"]["id"] for event in events} == {"r"}
    assert kept["exact"]
    assert kept["tokens"] == entries[0]["input_ids"] + whole["output_ids"]
    assert set(kept["generation_versions"]) == {-1, "default", "7", "8"}


async def test_an_aborted_generation_is_done_again_and_what_was_sampled_is_kept(start: Start) -> None:
    async with rollouts(start, "--abort-retry-wait-s", "0") as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.abort, "r")
        answer = await rollout.generate("r", max_new_tokens=12)
        first, second = await rollout.journal("r")
        lost, kept = await rollout.retrieve(first["text"]), await rollout.retrieve(answer["text"])
    assert answer["output_ids"] == second["output_ids"]
    assert second["input_ids"] == first["input_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert 5 <= len(first["output_ids"]) < 12
    for retrieved, entry in ((lost, first), (kept, second)):
        assert retrieved["exact"]
        assert retrieved["tokens"] == entry["input_ids"] + entry["output_ids"]


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}])
async def test_what_cannot_go_on_in_the_middle_is_done_again(start: Start, penalty: dict[str, float]) -> None:
    flags = ("--resume-aborted", "--abort-retry-wait-s", "0")
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.abort, "r")
        answer = await rollout.generate("r", max_new_tokens=12, **penalty)
        first, second = await rollout.journal("r")
    assert second["input_ids"] == first["input_ids"]
    assert answer["output_ids"] == second["output_ids"]


async def test_the_last_answer_is_kept_when_attempts_run_out(start: Start) -> None:
    flags = ("--abort-retries", "2", "--abort-retry-wait-s", "0")
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:

        async def give_up() -> None:
            for attempt in (1, 2, 3):
                await rollout.abort("r", attempt=attempt)

        tasks.start_soon(give_up)
        answer = await rollout.generate("r", max_new_tokens=100)
        entries = await rollout.journal("r")
    assert len(entries) == 3
    assert answer["output_ids"] == entries[-1]["output_ids"]
    assert answer["text"] == entries[-1]["text"]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_progress_is_not_held_against_a_resumed_generation(start: Start) -> None:
    flags = ("--resume-aborted", "--abort-retries", "1")
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:

        async def give_up() -> None:
            for attempt in (1, 2, 3):
                await rollout.abort("r", attempt=attempt)

        tasks.start_soon(give_up)
        answer = await rollout.generate("r", max_new_tokens=40)
        entries = await rollout.journal("r")
    assert len(entries) == 4
    assert_joined(answer, entries)


@pytest.mark.parametrize("asked", [{"rid": "roll"}, {"abort_all": True}], ids=["prefix", "all"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_abort_asked_for_through_the_router_is_not_undone(
    start: Start, asked: dict[str, Any], streams: bool
) -> None:
    flags = ("--resume-aborted", "--abort-retry-wait-s", "0")
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await rollout.sampled("roll-1", 5)
            await rollout.through("/abort_request", asked)

        tasks.start_soon(ask)
        if streams:
            answer = (await rollout.events("roll-1", max_new_tokens=100))[-1]
        else:
            answer = await rollout.generate("roll-1", max_new_tokens=100)
        entries = await rollout.journal("roll-1")
    assert len(entries) == 1
    assert_joined(answer, entries)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_asked_for_while_a_retry_waits_ends_the_wait(start: Start) -> None:
    async with rollouts(start) as rollout, anyio.create_task_group() as tasks:  # it would wait for 30 s

        async def ask() -> None:
            await rollout.abort("r")
            await rollout.nothing_held()
            await rollout.through("/abort_request", {"rid": "another"})
            await rollout.through("/abort_request", {"rid": "r"})

        tasks.start_soon(ask)
        with anyio.fail_after(25):
            answer = await rollout.generate("r", max_new_tokens=100)
        entries = await rollout.journal("r")
    assert len(entries) == 1
    assert answer["output_ids"] == entries[0]["output_ids"]


@pytest.mark.parametrize("resume", [False, True], ids=["again", "resumed"])
async def test_a_retry_waits_for_paused_engines_to_continue(start: Start, resume: bool) -> None:
    flags = ["--resume-aborted"] if resume else []
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:
        attempts: list[int] = []

        async def train() -> None:
            await rollout.sampled("r", 5)
            await rollout.through("/pause_generation", {"mode": "abort"})
            await rollout.nothing_held()
            attempts.append(len(await rollout.journal("r")))
            await rollout.through("/update_weights_from_disk", {"model_path": "/m", "weight_version": "7"})
            await rollout.through("/continue_generation", {})

        tasks.start_soon(train)
        with anyio.fail_after(25):
            answer = await rollout.generate("r", max_new_tokens=20)
        entries = await rollout.journal("r")
    assert attempts == [1]
    assert len(entries) == 2
    assert_joined(answer, entries if resume else entries[1:])
    assert answer["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize("resume", [False, True], ids=["again", "resumed"])
async def test_a_router_that_stops_in_a_pause_passes_the_abort_on(start: Start, resume: bool) -> None:
    flags = ["--resume-aborted"] if resume else []
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await rollout.sampled("r", 5)
            await rollout.through("/pause_generation", {"mode": "abort"})
            await rollout.nothing_held()
            rollout.running.router.stop()

        tasks.start_soon(stop)
        with anyio.fail_after(25):
            answer = await rollout.generate("r", max_new_tokens=100)
        entries = await rollout.journal("r")
        kept = await rollout.retrieve(answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert_joined(answer, entries)
    assert len(entries) == 1
    assert kept["exact"]


async def test_a_stream_that_has_begun_is_not_done_again(start: Start) -> None:
    async with rollouts(start, "--abort-retry-wait-s", "0") as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.abort, "r")
        events = await rollout.events("r", max_new_tokens=100)
        entries = await rollout.journal("r")
    assert len(entries) == 1
    assert_joined(events[-1], entries)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_stream_aborted_before_its_first_token_is_done_again(start: Start) -> None:
    flags = ("--engine-latency-ms", "300", "--abort-retry-wait-s", "0")
    async with rollouts(start, *flags) as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.abort, "r", 0)
        events = await rollout.events("r", max_new_tokens=4)
        first, second = await rollout.journal("r")
        stats = (await rollout.client.get("/cache_stats")).json()
    assert first["output_ids"] == []
    assert_joined(events[-1], [second])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert stats["unrecorded"] == {}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_nothing_is_tried_again_for_a_client_that_has_gone(start: Start, streams: bool) -> None:
    async with rollouts(start) as rollout:
        body = {"text": PROMPT, "rid": "r", "stream": streams, "sampling_params": {"max_new_tokens": 100}}
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                if streams:  # not a token is told, so that it would be tried again
                    body["sampling_params"] = {"max_new_tokens": 100, "stream_interval": 50}
                await rollout.client.post("/generate", json=body)

            tasks.start_soon(ask)
            await rollout.abort("r")
            await rollout.nothing_held()
            tasks.cancel_scope.cancel()
        await rollout.through("/pause_generation", {"mode": "abort"})
        await rollout.through("/continue_generation", {})  # would start a retry that waits
        await rollout.nothing_held()
        entries = await rollout.journal("r")
        kept = await rollout.retrieve(entries[0]["text"])
    assert len(entries) == 1
    assert kept["exact"]
    assert kept["tokens"] == entries[0]["input_ids"] + entries[0]["output_ids"]


async def test_a_client_that_leaves_a_resumed_stream_ends_it_at_the_engine(start: Start) -> None:
    async with rollouts(start, "--resume-aborted") as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.update_weights, "r", "7")
        endless = {"max_new_tokens": 2000, "ignore_eos": True, "skip_special_tokens": False}
        body = {"text": PROMPT, "rid": "r", "stream": True, "sampling_params": endless}
        told: list[int] = []
        async with rollout.client.stream("POST", "/generate", json=body) as reply:
            async for line in reply.aiter_lines():
                event = orjson.loads(line[6:]) if line else None
                if event is not None and event["meta_info"]["weight_version"] == "7":
                    told = event["output_ids"]
                    text = event["text"]
                    break
        await rollout.nothing_held()
        first, second = await rollout.journal("r")
        kept = await rollout.retrieve(text)
    assert second["finish_reason"]["type"] == "abort"
    assert told == (first["output_ids"] + second["output_ids"])[: len(told)]
    assert len(told) > len(first["output_ids"])
    assert kept["exact"]
    shown = len(kept["tokens"])  # the last ones may be half a character
    assert kept["tokens"] == (first["input_ids"] + told)[:shown]
    assert shown > len(first["input_ids"])


async def test_continued_answer_has_the_id_that_the_engine_gave(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    """A client without a rid of its own may abort by the one in its answer: the last attempt has to bear it, too."""

    def answer(name: str, ids: list[int], reason: str) -> tuple[int, bytes]:
        meta = {"id": name, "finish_reason": {"type": reason}, "completion_tokens": len(ids)}
        text = engine.tokenizer.decode(ids)
        return 200, orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})

    flags = ("--resume-aborted", "--abort-retry-wait-s", "0")
    async with routed(start, engine, checkpoint, *flags) as client:
        engine.script += [answer("a", [], "abort"), answer("b", [5], "abort"), answer("b", [6], "length")]
        told = (await client.running.client.post("/generate", json={"text": PROMPT})).json()
    assert [body.get("rid") for body in engine.asked] == [None, None, "b"]
    assert told["meta_info"]["id"] == "b"
    assert told["output_ids"] == [5, 6]


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (404, 1), (503, 2)])
async def test_refused_retry_is_repeated_only_if_that_may_help(
    start: Start, engine: ScriptedEngine, checkpoint: str, status: int, tries: int
) -> None:
    aborted = {"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": {"type": "abort"}}}
    flags = ("--abort-retries", "2", "--abort-retry-wait-s", "0")
    async with routed(start, engine, checkpoint, *flags) as client:
        engine.script += [(200, orjson.dumps(aborted)), (status, b"{}"), (status, b"{}")]
        answer = await client.running.client.post("/generate", json={"text": PROMPT})
    assert (answer.status_code, answer.json()) == (200, aborted)
    assert len(engine.asked) == 1 + tries


@pytest.mark.parametrize(("status_code", "tries"), [(400, 0), (503, 1), (None, 1)])
async def test_an_abort_that_finds_fault_with_the_request_is_passed_on(
    start: Start, engine: ScriptedEngine, checkpoint: str, status_code: int | None, tries: int
) -> None:
    reason = {"type": "abort", "message": "no", "status_code": status_code}
    aborted = {"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": reason}}
    flags = ("--abort-retries", "1", "--abort-retry-wait-s", "0")
    async with routed(start, engine, checkpoint, *flags) as client:
        engine.script += [(200, orjson.dumps(aborted))] * 2
        answer = await client.running.client.post("/generate", json={"text": PROMPT})
        stats = await client.stats()
    assert (answer.status_code, answer.json()) == (200, aborted)
    assert len(engine.asked) == 1 + tries
    assert stats["aborts"] == ({"passed_on": 1} if tries else {})


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_pitfall_7_a_fault_is_not_taken_for_an_abort(
    start: Start, engine: ScriptedEngine, checkpoint: str, status: int
) -> None:
    body = b'{"error":{"message":"abort"},"meta_info":{"finish_reason":{"type":"abort"}}}'
    async with routed(start, engine, checkpoint) as client:
        engine.script.append((status, body))
        with anyio.fail_after(25):
            answer = await client.running.client.post("/generate", json={"text": PROMPT})
    assert (answer.status_code, answer.content) == (status, body)
    assert len(engine.asked) == 1


async def test_pitfall_7_batches_and_streams_are_not_taken_for_aborts(start: Start) -> None:
    async with rollouts(start) as rollout:  # it would wait for 30 s
        body = {"text": [PROMPT, PROMPT], "sampling_params": {"max_new_tokens": 2}}
        with anyio.fail_after(25):
            both = await rollout.client.post("/generate", json=body)
            stream = await rollout.client.post("/generate", json={**body, "stream": True})
            events = await rollout.events("r", max_new_tokens=2)
    assert [len(one["output_ids"]) for one in both.json()] == [2, 2]
    assert stream.text.endswith("data: [DONE]\n\n")
    assert len(events[-1]["output_ids"]) == 2
