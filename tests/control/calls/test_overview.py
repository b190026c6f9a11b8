"""Questions to the fleet: what all engines say, who gave no answer, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from control.steered import Controlled, Steered, hung, steering
from core.servers import Wire, scripted
from core.servers import answer as answering
from holding import quarantine, stale
from plugged import until
from slime_control.calls import overview

if TYPE_CHECKING:
    import httpx

    from routers import Start

pytestmark = pytest.mark.anyio


def says(worker: Steered, path: str, document: Any, status: int = 200) -> Steered:
    worker.answers[path] = status, document if isinstance(document, bytes) else orjson.dumps(document)
    return worker


def loaded(tokens: int) -> dict[str, Any]:
    return {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": tokens}


def pool_of(running: Controlled) -> Any:
    return running.router.pool


# loads


@pytest.mark.parametrize("path", ["/get_loads", "/v1/loads"])
async def test_loads_are_those_of_all_workers(path: str) -> None:
    one = says(Steered(), "/v1/loads", {"loads": [loaded(5), {**loaded(7), "dp_rank": 1}]})
    old = says(says(Steered(), "/v1/loads", {}, 404), "/get_load", [{"dp_rank": 0, "num_tokens": 3}])
    async with steering(one, old) as running:
        answer = await running.client.get(path)
    assert answer.status_code == 200
    assert answer.json() == {
        "workers": [{"worker": one.url, "load": 12}, {"worker": old.url, "load": 3}],
        "loads": [
            {**loaded(5), "worker": one.url},
            {**loaded(7), "dp_rank": 1, "worker": one.url},
            {"dp_rank": 0, "num_tokens": 3, "worker": old.url},
        ],
    }
    assert [path for _, path, _ in old.got] == ["/v1/loads", "/get_load"]


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ({"loads": 1}, "no list of loads"),
        ({"loads": [1]}, "no list of loads"),
        (b"<html>", "no list of loads"),
        ({"loads": [{"dp_rank": 0}]}, "does not say num_used_tokens"),
        ({"loads": [{"num_used_tokens": True}]}, "does not say num_used_tokens"),
    ],
)
async def test_a_worker_that_does_not_tell_its_load_is_named(document: Any, wrong: str) -> None:
    good, bad = says(Steered(), "/v1/loads", {"loads": [loaded(5)]}), says(Steered(), "/v1/loads", document)
    async with steering(good, bad) as running:
        workers = (await running.client.get("/get_loads")).json()["workers"]
    assert workers[0] == {"worker": good.url, "load": 5}
    assert (workers[1]["worker"], workers[1]["load"]) == (bad.url, -1)
    assert wrong in workers[1]["error"]


async def test_who_is_away_is_named_and_not_asked() -> None:
    away, broken = Steered(), says(Steered(), "/v1/loads", b"", 500)
    async with steering(away, broken) as running:
        quarantine(pool_of(running), pool_of(running).find(away.url), "dead")
        workers = (await running.client.get("/get_loads")).json()["workers"]
    assert {worker["worker"]: worker["error"] for worker in workers} == {
        away.url: "it is quarantined, and was not asked",
        broken.url: "it answered /v1/loads?include=core with 500",
    }
    assert away.got == []


# metrics


async def test_the_metrics_of_all_engines_are_one_text() -> None:
    workers = [says(Steered(), "/metrics", b"# TYPE sglang:x gauge\nsglang:x 1\n") for _ in range(2)]
    async with steering(*workers) as running:
        answer = await running.client.get("/engine_metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text.splitlines() == [
        "# TYPE sglang_x gauge",
        *(f'sglang_x{{worker_addr="{worker.url}"}} 1' for worker in workers),
    ]
    assert workers[0].headers[-1]["accept-encoding"] == "identity"


async def test_engines_without_metrics_are_left_out_and_noted() -> None:
    good = says(Steered(), "/metrics", b"x 1\n")
    off, odd = says(Steered(), "/metrics", b"", 404), says(Steered(), "/metrics", b"<html>")
    async with steering(good, off, odd) as running:
        answer = await running.client.get("/engine_metrics")
    assert answer.text.splitlines() == [
        f"# left out: {off.url}: it answered /metrics with 404",
        f"# left out: {odd.url}: its metrics cannot be read: line 1 is no Prometheus sample",
        f'x{{worker_addr="{good.url}"}} 1',
    ]


async def test_an_engine_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_METRICS_S", 2.0)
    good, bad = says(Steered(), "/metrics", b"x 1\n"), hung()
    async with steering(good, bad) as running:
        lines = (await running.client.get("/engine_metrics")).text.splitlines()
    assert lines == [
        f"# left out: {bad.url}: no answer within 2 s",
        f'x{{worker_addr="{good.url}"}} 1',
    ]


async def test_metrics_take_a_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_METRICS_BYTES", 20)
    monkeypatch.setattr(overview, "_METRICS_TOTAL_BYTES", 6)
    small, large, late = (says(Steered(), "/metrics", text) for text in (b"x 1\n", b"x 1\n" * 10, b"x 1\n"))
    async with steering(small, large, late) as running:
        lines = (await running.client.get("/engine_metrics")).text.splitlines()
    notes = [line for line in lines if line.startswith("#")]
    assert len(lines) == 3  # one of the two that would fit alone
    assert f"# left out: {large.url}: its answer to /metrics is larger than 20 bytes" in notes
    assert [line for line in notes if "the metrics of all workers are larger than 6 bytes" in line]


async def test_when_no_engine_tells_metrics_it_is_a_failure() -> None:
    worker = says(Steered(), "/metrics", b"", 404)
    async with steering(worker) as running:
        answer = await running.client.get("/engine_metrics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "NO_ANSWER")
    assert (
        f"--enable-metrics): {worker.url}: it answered /metrics with 404" in answer.json()["error"]["message"]
    )


# health


async def test_the_fleet_is_well_when_one_engine_generates() -> None:
    bad, slow, good = says(Steered(), "/health_generate", b"", 503), hung(), Steered()
    async with steering(bad, slow, good) as running:
        with anyio.fail_after(15):
            answer = await running.client.get("/health_generate")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "workers": [good.url]})


async def test_the_fleet_is_not_well_when_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_HEALTH_S", 2.0)
    bad, slow = says(Steered(), "/health_generate", b"", 503), hung()
    async with steering(bad, slow) as running:
        answer = await running.client.get("/health_generate")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "NO_HEALTHY_ENGINE")
    assert f"{bad.url}: it answered /health_generate with 503" in error["message"]
    assert "no worker answered /health_generate with success within 2 s" in error["message"]
    assert f"{slow.url}: no answer in time" in error["message"]


async def test_healthy_worker_is_found_behind_eight_hung_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_control.calls.overview.random.sample", lambda workers, _: workers)
    monkeypatch.setattr(overview, "_HEALTH_PATIENCE_S", 0.05)
    good = Steered()
    async with steering(*(hung() for _ in range(8)), good) as running:
        with anyio.fail_after(15):
            answer = await running.client.get("/health_generate")
    assert (answer.status_code, answer.json()["workers"]) == (200, [good.url])


async def test_each_worker_is_asked_before_the_fleet_is_called_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_HEALTH_S", 0.6)
    workers = [hung() for _ in range(9)]
    async with steering(*workers) as running:
        answer = await running.client.get("/health_generate")
    assert answer.status_code == 503
    assert [path for worker in workers for _, path, _ in worker.got] == ["/health_generate"] * 9


async def test_only_workers_that_can_be_used_are_asked_for_their_health() -> None:
    worker = Steered()
    async with steering(worker) as running:
        (registered,) = pool_of(running)
        stale(pool_of(running), registered, "its weights are old")
        answer = await running.client.get("/health_generate")
    assert answer.status_code == 503
    assert f"{worker.url} regular stale: its weights are old" in answer.json()["error"]["message"]
    assert worker.got == []


async def test_a_worker_of_each_kind_has_to_be_well() -> None:
    prefill, decode = Steered(), says(Steered(), "/health_generate", b"", 503)
    async with steering(prefill, decode) as running:
        pool_of(running).require("prefill", "decode")
        await running.router.add_worker(prefill.url, worker_type="prefill")
        await running.router.add_worker(decode.url, worker_type="decode")
        assert (await running.client.get("/health_generate")).status_code == 503
        decode.answers.clear()
        answer = await running.client.get("/health_generate")
    assert answer.json()["workers"] == [prefill.url, decode.url]


# what engines say about themselves


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("question", ["server_info", "model_info"])
async def test_documents_of_all_are_there_and_those_of_one_at_the_top(question: str, old: bool) -> None:
    path = f"/get_{question}" if old else f"/{question}"
    one = says(Steered("7"), f"/{question}", {"tp_size": 1, "weight_version": "7"})
    two = says(Steered("7"), f"/{question}", {"tp_size": 2, "weight_version": "7"})
    async with steering(one, two) as running:
        await running.client.post("/weight_version", json={"weight_version": "8"})
        answer = (await running.client.get(path)).json()
    assert answer == {
        "tp_size": 1,
        "weight_version": "8",
        "healthy_workers": 2,
        "total_workers": 2,
        "workers": {
            one.url: {"tp_size": 1, "weight_version": "7"},
            two.url: {"tp_size": 2, "weight_version": "7"},
        },
    }


async def test_the_top_is_of_a_worker_that_can_be_used() -> None:
    one, two = (says(Steered(), "/server_info", {"name": name}) for name in ("one", "two"))
    async with steering(one, two) as running:
        stale(pool_of(running), pool_of(running).find(one.url), "old")
        answer = (await running.client.get("/server_info")).json()
    assert (answer["name"], answer["healthy_workers"], answer["total_workers"]) == ("two", 1, 2)
    assert answer["workers"][one.url] == {"name": "one"}


async def test_who_does_not_introduce_itself_is_named() -> None:
    good, bad = says(Steered(), "/server_info", {"a": 1}), says(Steered(), "/server_info", [1])
    async with steering(good, bad) as running:
        answer = (await running.client.get("/server_info")).json()
        assert answer["workers"][bad.url] == {"error": "its answer to /server_info is no JSON object"}
        pool_of(running).remove(pool_of(running).find(good.url))
        failed = await running.client.get("/server_info")
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "NO_ANSWER")


async def test_the_keys_of_engines_are_nobodys_business() -> None:
    worker = says(Steered(), "/server_info", {"api_key": "secret", "admin_api_key": "secret", "tp_size": 1})
    async with steering(worker) as running:
        answer = await running.client.get("/server_info")
    assert "secret" not in answer.text
    assert answer.json()["workers"][worker.url] == {"api_key": None, "admin_api_key": None, "tp_size": 1}


async def test_the_weight_version_is_the_fleets() -> None:
    async with steering(Steered("7")) as running:
        await running.client.post("/weight_version", json={"weight_version": "8"})
        answer = await running.client.get("/get_weight_version")
        assert answer.json() == (await running.client.get("/weight_version")).json()
    assert answer.json()["weight_version"] == "8"


# all of them


@pytest.mark.parametrize("path", sorted(overview.QUESTIONS))
async def test_questions_are_read_only(path: str) -> None:
    worker = Steered()
    async with steering(worker) as running:
        for method in ("POST", "PUT", "DELETE"):
            refused = await running.client.request(method, path, json={})
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert worker.got == []


@pytest.mark.parametrize("path", sorted(overview.QUESTIONS))
async def test_without_workers_there_is_an_answer_too(path: str) -> None:
    async with steering() as running:
        answer = await running.client.get(path)
    if path in ("/get_loads", "/v1/loads", "/get_weight_version"):
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_WORKER")


async def test_each_worker_is_shown_its_own_key() -> None:
    seen: list[list[bytes]] = []

    async def serve(wire: Wire) -> None:
        while request := await wire.request():
            seen.append(request.values(b"authorization"))
            await wire.send(answering(b"x 1\n"))

    async with steering() as running, scripted(serve) as server:
        await running.client.post("/workers", json={"url": server.url, "api_key": "mine"})
        seen.clear()
        headers = {"authorization": "Bearer the-clients"}
        answer: httpx.Response = await running.client.get("/engine_metrics", headers=headers)
        assert answer.status_code == 200
    assert seen == [[b"Bearer mine"]]


async def test_many_are_not_asked_at_once() -> None:
    """Eight at a time are made to generate."""
    workers = [hung() for _ in range(10)]
    async with steering(*workers) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(running.client.get, "/health_generate")
        await until(lambda: sum(len(worker.got) for worker in workers) == 8)
        await anyio.sleep(0.1)  # the others would have been asked by now
        assert sum(len(worker.got) for worker in workers) == 8
        for worker in workers:
            assert worker.hold is not None
            worker.hold.set()


async def test_a_router_as_it_is_started_answers_for_its_engines(start: Start) -> None:
    async with start("--plugin", "engine", "--engine-workers", "2") as running:
        urls = [worker.url for worker in running.router.pool]
        for path in ("/server_info", "/model_info"):
            assert list((await running.client.get(path)).json()["workers"]) == urls
        loads = (await running.client.get("/get_loads")).json()["workers"]
        assert loads == [{"worker": url, "load": 0} for url in urls]
        metrics = (await running.client.get("/engine_metrics")).text
        for url in urls:
            assert f'sglang_num_running_reqs{{worker_addr="{url}",model_name=' in metrics
        assert metrics.count("# TYPE sglang_num_running_reqs gauge\n") == 1
        assert (await running.client.get("/health_generate")).json()["workers"][0] in urls
