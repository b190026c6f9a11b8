"""A trainer's step while conversations go on, whichever of the two plugins is loaded first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from deadlines import HANG_S
from plugged import until
from slime_control.client import RouterClient

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy? 😀<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 40
RESUMED = ("--resume-aborted", "--abort-retry-wait-s", "0.3")

both_orders = pytest.mark.parametrize("order", [("radix_cache", "control"), ("control", "radix_cache")])


def flags(order: tuple[str, ...], *more: str) -> list[str]:
    engine = ["--plugin", "engine", "--engine-workers", "3", "--engine-tokens-per-second", "60"]
    return [*engine, *(part for name in order for part in ("--plugin", name)), *more]


async def on_each_engine(running: Running, path: str) -> list[Any]:
    return [(await running.client.get(f"{worker.url}{path}")).json() for worker in running.router.pool]


async def until_running(running: Running, count: int) -> None:
    """Return when the engines have sampled something of ``count`` requests."""
    running_now = 0
    with anyio.fail_after(HANG_S):
        while running_now < count:
            await anyio.sleep(0.01)
            loads = await on_each_engine(running, "/v1/loads")
            running_now = sum(load["loads"][0]["num_running_reqs"] for load in loads)
    await anyio.sleep(0.1)


def ask(number: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 1.2}
    return {"text": PROMPT, "rid": f"r{number}", "sampling_params": sampling, **more}


@both_orders
async def test_generations_go_on_over_an_update_and_every_token_is_known(
    start: Start, order: tuple[str, ...]
) -> None:
    outputs: dict[int, dict[str, Any]] = {}
    async with start(*flags(order, *RESUMED)) as running, RouterClient(running.url) as router:
        client = running.client

        async def generate(number: int) -> None:
            body = ask(number, stream=number % 2 == 1)
            answer = await client.post("/generate", json=body, headers={"x-session-id": f"s{number}"})
            assert answer.status_code == 200, answer.text
            last = orjson.loads(answer.content.split(b"\n\n")[-3][6:]) if body["stream"] else answer.json()
            outputs[number] = last

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(generate, number)
            await until_running(running, 6)
            async with router.paused():
                # Aborted by the engines, not by anybody who asked for it: they wait, and no worker is leased.
                await until(lambda: not any(worker.in_flight for worker in running.router.pool))
                tasks.start_soon(generate, 6)  # a new one waits as well
                await anyio.sleep(0.8)  # longer than --abort-retry-wait-s
                assert outputs == {}
                done = await router.update_weights_from_disk("/m", weight_version="7")
                assert done["success"] is True
                assert outputs == {}
            await until(lambda: len(outputs) == 7)
        for number, output in outputs.items():
            about = output["meta_info"]
            assert about["finish_reason"]["type"] == "length"
            assert about["completion_tokens"] == TOKENS
            spans = [span["version"] for span in about.get("weight_versions", [])] or [
                about["weight_version"]
            ]
            assert spans == (["default", "7"] if number < 6 else ["7"])
            told = {"text": PROMPT + output["text"], "session_id": f"s{number}"}
            record = (await client.post("/retrieve_from_text", json=told)).json()
            assert record["exact"], record["inexact_reason"]
            entries = [
                entry
                for journal in await on_each_engine(running, f"/journal?rid=r{number}")
                for entry in journal["entries"]
            ]
            entries.sort(key=lambda entry: len(entry["input_ids"]))
            assert record["tokens"] == entries[-1]["input_ids"] + entries[-1]["output_ids"]
            sampled = [version for entry in entries for version in entry["output_versions"]]
            assert [each for each in record["generation_versions"] if each != -1] == sampled
        stats = (await client.get("/cache_stats")).json()
        assert stats["aborts"]["resumed"] >= 6
        assert stats["unrecorded"] == {}


@both_orders
async def test_abort_all_ends_running_and_waiting_requests_without_retry(
    start: Start, order: tuple[str, ...]
) -> None:
    answers: list[httpx.Response] = []
    async with start(*flags(order, "--resume-aborted")) as running, RouterClient(running.url) as router:

        async def generate(number: int) -> None:
            answers.append(await running.client.post("/generate", json=ask(number)))

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(generate, number)
            await until_running(running, 3)
            await router.pause()
            tasks.start_soon(generate, 3)
            await anyio.sleep(0.2)
            assert answers == []
            await router.abort()
            await until(lambda: len(answers) == 4)
            await router.resume()
        reasons = [answer.json()["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort"] * 4
        assert all(journal["entries"] == [] for journal in await on_each_engine(running, "/journal?rid=r3"))


@both_orders
async def test_an_abort_by_name_finds_the_worker_that_has_it(start: Start, order: tuple[str, ...]) -> None:
    async with start(*flags(order)) as running, RouterClient(running.url) as router:
        answers: dict[int, Any] = {}

        async def generate(number: int) -> None:
            answers[number] = (await running.client.post("/generate", json=ask(number))).json()

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(generate, number)
            await until_running(running, 3)
            await router.abort("r1")
        reasons = [answers[number]["meta_info"]["finish_reason"]["type"] for number in range(3)]
        assert reasons == ["length", "abort", "length"]
        assert answers[1]["meta_info"]["completion_tokens"] < TOKENS


@pytest.mark.parametrize(
    "order", [("radix_cache", "control", "openai"), ("control", "radix_cache", "openai")]
)
async def test_chats_wait_for_the_end_of_a_pause(start: Start, order: tuple[str, ...]) -> None:
    async with start(*flags(order)) as running, RouterClient(running.url) as router:
        answers: list[httpx.Response] = []

        async def chat() -> None:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            answers.append(await running.client.post("/v1/chat/completions", json=body))

        async with anyio.create_task_group() as tasks, router.paused():
            tasks.start_soon(chat)
            await anyio.sleep(0.3)
            assert answers == []
            assert all(not journal["entries"] for journal in await on_each_engine(running, "/journal"))
        assert [answer.status_code for answer in answers] == [200]
