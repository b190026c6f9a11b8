"""Abort, pause, continue, weights: what a trainer does to an engine that is at work."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from deadlines import HANG_S
from engine.served import CHAT, JSONDict, Serve, Served
from slime_engine.model import NgramModel

pytestmark = pytest.mark.anyio

#: Far from finished when a test does something to it.
ENDLESS = {"max_new_tokens": 5000, "ignore_eos": True}
PACE = 200.0


class Started:
    """Requests under way, and their answers once they are there."""

    def __init__(self, engine: Served, tasks: Any) -> None:
        self._engine = engine
        self._tasks = tasks
        self.answers: dict[str, JSONDict] = {}

    async def __call__(self, rid: str, tokens: int = 3, **body: Any) -> None:
        """Start a request and wait until it has ``tokens`` tokens (0: until it is queued)."""

        async def generate() -> None:
            params = body.pop("sampling_params", ENDLESS)
            text = body.pop("text", CHAT)
            self.answers[rid] = await self._engine.generate(
                text=text, rid=rid, sampling_params=params, **body
            )

        self._tasks.start_soon(generate)
        await self._engine.until(
            lambda s: (
                rid in s.waiting
                if tokens == 0
                else rid in s.running and s.running[rid].completion_tokens >= tokens
            )
        )

    async def answer(self, rid: str) -> JSONDict:
        with anyio.fail_after(HANG_S):
            while rid not in self.answers:  # noqa: ASYNC110  # a test may look
                await anyio.sleep(0.002)
        return self.answers[rid]


async def test_abort_returns_the_partial_text(serve: Serve, model: NgramModel) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("one", return_logprob=True)
        await engine.post("/abort_request", rid="one")
        answer = await start.answer("one")
        (entry,) = await engine.journal("one")
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted"}
    assert meta["completion_tokens"] == len(answer["output_ids"]) >= 3
    assert answer["text"] == model.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert entry["aborted"] is True
    assert entry["output_ids"] == answer["output_ids"]
    assert entry["text"] == answer["text"]


async def test_abort_goes_by_prefix(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        for rid in ("job-1", "job-2", "other"):
            await start(rid)
        await engine.post("/abort_request", rid="nobody")
        await engine.post("/abort_request", rid="")
        await engine.post("/abort_request", abort_all=False)
        assert len(engine.host.engine.scheduler.running) == 3
        await engine.post("/abort_request", rid="job")
        await start.answer("job-1")
        await start.answer("job-2")
        assert list(engine.host.engine.scheduler.running) == ["other"]
        await engine.post("/abort_request", abort_all=True)
        assert (await start.answer("other"))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_in_the_queue_has_only_a_few_keys(serve: Serve) -> None:
    async with (
        serve(tokens_per_second=PACE, max_running_requests=1) as engine,
        anyio.create_task_group() as tasks,
    ):
        start = Started(engine, tasks)
        await start("running")
        await start("waiting", 0, return_logprob=True, return_routed_experts=True)
        await engine.post("/abort_request", rid="waiting")
        answer = await start.answer("waiting")
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"].pop("e2e_latency") >= 0
        assert answer["meta_info"] == {
            "id": "waiting",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "default",
            "completion_tokens": 0,
        }
        await engine.post("/abort_request", abort_all=True)


async def test_abort_ends_a_stream_with_its_reason(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine:
        events = []
        async for event in engine.events("/generate", text=CHAT, rid="s", sampling_params=ENDLESS):
            events.append(event)
            if len(events) == 3:
                await engine.post("/abort_request", rid="s")
        (entry,) = await engine.journal("s")
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1]["output_ids"] == entry["output_ids"]
    assert events[-1]["text"] == entry["text"]


async def test_pausing_with_abort_ends_everything_and_holds_what_comes(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("before")
        await engine.post("/pause_generation")
        assert (await start.answer("before"))["meta_info"]["finish_reason"]["type"] == "abort"
        await start("after", 0, sampling_params={"max_new_tokens": 2})
        assert engine.host.engine.scheduler.running == {}
        await engine.post("/continue_generation")
        answer = await start.answer("after")
        assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_keeps_the_tokens_and_new_weights_show_in_spans(
    serve: Serve, model: NgramModel, mode: str
) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 3}
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("x", 5, return_logprob=True, sampling_params=params)
        await engine.post("/pause_generation", mode=mode)
        scheduler = engine.host.engine.scheduler
        assert ("x" in scheduler.waiting, "x" in scheduler.running) == (mode == "retract", mode != "retract")
        assert (await engine.client.post("/flush_cache")).status_code == (200 if mode == "retract" else 400)
        (held,) = await engine.journal("x")
        update = await engine.post("/update_weights_from_disk", model_path="m", weight_version="2")
        assert update.json()["success"] is True
        (still,) = await engine.journal("x")
        assert still == held
        assert held["finish_reason"] is None
        await engine.post("/continue_generation")
        answer = await start.answer("x")
        (entry,) = await engine.journal("x")
    meta, split = answer["meta_info"], len(held["output_ids"])
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert meta["weight_version"] == "2"
    assert meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": split},
        {"version": "2", "start": split, "end": 30},
    ]
    assert entry["output_versions"] == ["default"] * split + ["2"] * (30 - split)
    ids = entry["input_ids"] + entry["output_ids"]
    scores = model.logprobs(ids, entry["output_versions"], start=len(entry["input_ids"]))
    assert [one[0] for one in meta["output_token_logprobs"]] == scores == entry["output_logprobs"]


async def test_a_pause_without_an_update_leaves_no_trace(serve: Serve) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 3}
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("x", 5, sampling_params=params)
        await engine.post("/pause_generation", mode="in_place")
        await engine.post("/continue_generation")
        answer = await start.answer("x")
        undisturbed = await engine.generate(text=CHAT, sampling_params=params)
    assert answer["output_ids"] == undisturbed["output_ids"]
    assert "weight_versions" not in answer["meta_info"]


async def test_a_retracted_request_can_be_aborted_with_what_it_has(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("x", 5)
        await engine.post("/pause_generation", mode="retract")
        await engine.post("/abort_request", rid="x")
        answer = await start.answer("x")
    assert len(answer["output_ids"]) >= 5
    assert answer["meta_info"]["prompt_tokens"] > 0


async def test_an_unknown_pause_mode_is_refused(serve: Serve) -> None:
    async with serve() as engine:
        answer = await engine.post("/pause_generation", 400, mode="later")
        assert "retract" in answer.json()["error"]["message"]
        assert (await engine.client.post("/pause_generation")).status_code == 400


async def test_an_update_waits_for_what_runs_and_lets_nobody_in(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("old", 3, sampling_params={"max_new_tokens": 40, "ignore_eos": True})
        done: list[float] = []

        async def update() -> None:
            await engine.post("/update_weights_from_tensor", weight_version="2", serialized_named_tensors=[])
            done.append(anyio.current_time())

        tasks.start_soon(update)
        await engine.until(lambda s: s.updates_waiting == 1)
        await start("new", 0, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        assert not done
        assert (await start.answer("old"))["meta_info"]["weight_version"] == "default"
        assert (await start.answer("new"))["meta_info"]["weight_version"] == "2"
        (old,) = await engine.journal("old")
        (new,) = await engine.journal("new")
        assert set(old["output_versions"]) == {"default"}
        assert set(new["output_versions"]) == {"2"}
        assert done


async def test_an_update_may_abort_what_runs(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("x")
        await engine.post("/update_weights_from_distributed", weight_version="2", abort_all_requests=True)
        assert (await start.answer("x"))["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await engine.get("/model_info"))["weight_version"] == "2"


@pytest.mark.parametrize("source", ["disk", "tensor", "distributed", "ipc"])
async def test_every_way_to_update_names_the_new_version(serve: Serve, source: str) -> None:
    async with serve(weight_version="5") as engine:
        path = f"/update_weights_from_{source}"
        answer = (await engine.post(path, model_path="m", weight_version="6")).json()
        assert answer["success"] is True
        assert "6" in answer["message"]
        assert (await engine.generate(text="a"))["meta_info"]["weight_version"] == "6"
        await engine.post(path, model_path="m")
        assert (await engine.get("/get_model_info"))["weight_version"] == "6"
        refused = await engine.post(path, 400, model_path="m", weight_version=7)
        assert "weight_version" in refused.json()["error"]["message"]


async def test_the_version_alone_can_be_changed(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        await start("kept")
        await engine.post("/update_weight_version", new_version="8", abort_all_requests=False)
        assert "kept" in engine.host.engine.scheduler.running
        answer = await engine.post("/update_weight_version", new_version="9")
        assert answer.json()["new_version"] == "9"
        assert (await start.answer("kept"))["meta_info"]["finish_reason"]["type"] == "abort"
        await engine.post("/update_weight_version", 400)
        await engine.post("/update_weights_from_disk", 400, weight_version="1")


async def test_nothing_is_sampled_while_the_memory_is_released(serve: Serve) -> None:
    async with serve() as engine, anyio.create_task_group() as tasks:
        start = Started(engine, tasks)
        released = await engine.post("/release_memory_occupation", tags=["weights"])
        assert (released.headers["content-type"], released.json()) == ("application/json", None)
        await start("x", 0, sampling_params={"max_new_tokens": 2})
        assert engine.host.engine.scheduler.tokens["generation"] == 0
        assert (await engine.client.post("/resume_memory_occupation")).json() is None
        assert len((await start.answer("x"))["output_ids"]) >= 1


async def test_the_cache_is_flushed_only_when_nothing_runs(serve: Serve) -> None:
    async with serve(tokens_per_second=PACE) as engine, anyio.create_task_group() as tasks:
        assert (await engine.client.get("/flush_cache")).status_code == 200
        start = Started(engine, tasks)
        await start("x")
        assert (await engine.client.post("/flush_cache")).status_code == 400
        await engine.post("/abort_request", abort_all=True)


async def test_weight_groups_are_accepted(serve: Serve) -> None:
    async with serve() as engine:
        for path in ("/init_weights_update_group", "/destroy_weights_update_group"):
            answer = await engine.post(path, group_name="g", rank_offset=1, world_size=2)
            assert answer.json()["success"] is True
