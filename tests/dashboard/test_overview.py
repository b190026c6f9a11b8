"""Data of the first page, of routers that have served requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from deadlines import HANG_S, until
from router_core import Worker
from routers import BARE, Start, answering
from slime_dashboard.numbers import Numbers
from slime_testing import FakeEngine, Running, serving

pytestmark = pytest.mark.anyio

WITH_TOKENS = ("--plugin", "engine", "--engine-workers", "2", "--plugin", "radix_cache")
HOSTILE = '<img src=x onerror="alert(1)"> \u202egnp.exe'


async def data(running: Running, name: str = "overview", **parameters: Any) -> dict[str, Any]:
    answer = await running.client.get(f"/ui/data/{name}", params=parameters)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def generate(running: Running, session: str, text: str = "Hi") -> tuple[str, int]:
    """The text with its continuation, and the number of sampled tokens."""
    body = {"text": text, "session_id": session, "sampling_params": {"max_new_tokens": 4}}
    answer = await running.client.post("/generate", json=body)
    assert answer.status_code == 200
    generated = answer.json()
    return text + str(generated["text"]), int(generated["meta_info"]["completion_tokens"])


async def test_fleet_shows_holds_breakers_loads_and_versions(start: Start) -> None:
    async with start(*WITH_TOKENS) as running:
        pool = running.router.pool
        first, second = pool
        await running.router.announce_weights("7", "announced")
        pool.hold(second, "health", "connection refused", "quarantined")
        shown = await data(running)
    assert (shown["fleet"]["total"], shown["fleet"]["ready"]) == (2, 1)
    held, ready = shown["fleet"]["workers"]  # those that get no requests come first
    assert held["holds"] == [["health", "connection refused"]]
    assert (held["url"], held["state"]) == (second.url, "quarantined")
    assert (ready["url"], ready["state"], ready["holds"]) == (first.url, "ready", [])
    assert (ready["load"], ready["breaker"], ready["weight_version"]) == (0, "closed", "7")
    assert shown["weights"]["version"] == "7"
    assert shown["weights"]["age_s"] >= 0
    assert [version for _, version in shown["weights"]["updates"]] == ["7"]


async def test_history_counts_generations_and_their_tokens(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_dashboard.overview._INTERVAL_S", 0.1)
    async with start(*WITH_TOKENS) as running:
        for _ in range(3):
            await generate(running, "a")
        columns = ("succeeded", "sampled_tokens", "prompt_tokens", "hit_rate", "whole_p50", "whole_p95")
        history: dict[str, list[Any]] = {}
        with anyio.fail_after(HANG_S):
            while not all(any(history.get(name, ())) for name in columns):
                await anyio.sleep(0.05)
                history = (shown := await data(running))["history"]
        assert not any(history["failed"])
        for median, high in zip(history["whole_p50"], history["whole_p95"], strict=True):
            assert median is None or 0 < median <= high
        assert (await data(running, since=history["time"][-1] + 3600))["history"]["time"] == []
    assert shown["interval_s"] == 0.1
    assert shown["cache"]["prompts"] == {"hit": 2, "miss": 1}
    assert shown["cache"]["kept_tokens"] > 0


async def test_each_request_has_one_outcome(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: [{"text": "a", "meta_info": {}}] * 2
    engine.hold_after = 1
    async with start(*BARE, "--plugin", "metrics", "--plugin", "dashboard") as running:
        numbers, body = Numbers(running.router), {"text": "x", "stream": True}

        def outcomes() -> tuple[int, int, int]:
            totals = numbers.cumulative()
            return totals.succeeded, totals.refused, totals.failed

        async with serving(engine.app) as url:
            worker, _ = await running.router.add_worker(url)
            await running.client.post("/generate", json=body)
            engine.hold = anyio.Event()
            async with running.client.stream("POST", "/generate", json=body) as answer:
                await anext(answer.aiter_bytes())
            await until(lambda: outcomes() == (1, 0, 1))
            engine.hold, engine.delay = None, anyio.Event()
            with anyio.move_on_after(HANG_S) as leaving:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(running.client.post, "/generate", json=body))
                    await until(lambda: bool(worker.in_flight))
                    leaving.cancel()
            await until(lambda: sum(outcomes()) == 3)
            assert outcomes() == (1, 1, 1)  # a client that leaves before the head of the answer: 499
            engine.delay.set()
            running.router.pool.remove(worker)


async def test_failed_sample_is_logged_and_the_router_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no numbers")

    monkeypatch.setattr("slime_dashboard.overview._INTERVAL_S", 0.05)
    async with start(*WITH_TOKENS) as running:
        with monkeypatch.context() as patch:
            patch.setattr("slime_dashboard.overview.Overview.sample", fail)
            await until(lambda: caplog.text.count("RuntimeError: no numbers") > 1)
        with anyio.fail_after(HANG_S):
            while not (await data(running))["history"]["time"]:  # noqa: ASYNC110  # it has no event to set
                await anyio.sleep(0.05)
    assert "the dashboard has no sample of the last 0.05 s" in caplog.text


async def test_metric_that_fails_is_left_out(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime_dashboard.overview._INTERVAL_S", 0.01)
    async with start(*BARE, "--plugin", "metrics", "--plugin", "dashboard") as running:
        metrics = running.router.components.get("metrics")
        for name in ("slime_requests_queued", "slime_slots_held"):
            metrics.gauge(name, "Fails.", lambda: 1 / 0)
        with anyio.fail_after(HANG_S):
            while not (shown := await data(running))["history"]["time"]:  # noqa: ASYNC110  # it has no event to set
                await anyio.sleep(0.01)
    assert shown["waiting"]["slot"] is shown["slots"]["held"] is None
    assert "the metric slime_slots_held is left out" in caplog.text


async def test_exactness_is_told_by_reason(start: Start) -> None:
    async with start(*WITH_TOKENS, "--plugin", "openai") as running:
        text, _ = await generate(running, "a")
        for asked in (text, text, text + " unknown"):
            await running.client.post("/retrieve_from_text", json={"text": asked})
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for path, body in (("/v1/chat/completions", chat), ("/generate", {"text": "Hi", "unknown": 1})):
            assert (await running.client.post(path, json=body)).status_code == 200
        shown = await data(running)
    assert shown["exactness"]["retrieved"] == {"exact": 2, "uncovered_text": 1}
    assert shown["exactness"]["generated"] == {"exact": 2, "unknown_field": 1}


async def test_pause_is_told_with_those_who_wait(start: Start) -> None:
    async with start(*WITH_TOKENS) as running:
        assert (await data(running))["paused"] is False
        assert (await running.client.post("/pause_generation", json={})).status_code == 200
        shown = await data(running)
        assert (shown["paused"], shown["waiting"]["pause"]) == (True, 0)
        await running.client.post("/continue_generation", json={})


async def test_without_other_plugins_their_numbers_are_none(start: Start) -> None:
    async with (
        serving(answering(b"{}")) as url,
        start(*BARE, "--plugin", "dashboard", "--worker-urls", url) as running,
    ):
        shown = await data(running)
        sessions = await data(running, "sessions")
    for missing in ("history", "cache", "exactness", "paused", "sessions"):
        assert shown[missing] is None, missing
    assert shown["fleet"]["workers"][0]["breaker"] is None
    assert (sessions["recorded"], sessions["sessions"]) == (False, [])


async def test_sessions_are_listed_newest_first_in_pages(start: Start) -> None:
    async with start(*WITH_TOKENS) as running:
        for number in range(25):
            text, before = await generate(running, f"rollout-{number}")
        _, after = await generate(running, "rollout-24", text + " More")
        first = await data(running, "sessions")
        second = await data(running, "sessions", offset=20)
        assert [one["name"] for one in first["sessions"]] == [f"rollout-{24 - place}" for place in range(20)]
        assert (first["total"], first["has_more"]) == (25, True)
        assert [one["name"] for one in second["sessions"]] == [f"rollout-{4 - place}" for place in range(5)]
        assert second["has_more"] is False
        newest = first["sessions"][0]
        assert (newest["responses"], newest["tokens"], newest["complete"]) == (2, before + after, True)


async def test_search_finds_parts_of_names_and_nothing_else(start: Start) -> None:
    async with start(*WITH_TOKENS) as running:
        for name in ("a/1", "b/1", "a/2", HOSTILE):
            await generate(running, name)
        assert [one["name"] for one in (await data(running, "sessions", search="a/"))["sessions"]] == [
            "a/2",
            "a/1",
        ]
        assert [one["name"] for one in (await data(running, "sessions", search="<img"))["sessions"]] == [
            HOSTILE
        ]
        assert (await data(running, "sessions", search="A/"))["sessions"] == []


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("overview?since=-1", "since: wanted a number"),
        ("overview?since=nan", "since: wanted a number"),
        ("sessions?offset=x", "offset: wanted a number from 0 to 1e+06, got 'x'"),
        ("sessions?offset=1e9", "offset: wanted"),
        (f"sessions?search={'a' * 1025}", "search: wanted at most 1024 characters"),
    ],
)
async def test_wrong_parameter_is_a_400(path: str, part: str, start: Start) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        answer = await running.client.get(f"/ui/data/{path}")
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


async def test_large_fleet_is_cut_and_counted(start: Start) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        pool = running.router.pool
        for number in range(230):
            pool.add(Worker(f"http://127.0.0.1:{20000 + number}"))
        shown = await data(running)
    assert shown["fleet"]["total"] == 230
    assert len(shown["fleet"]["workers"]) == 200
