"""While the engines are paused new requests wait in the router, and none of them is forgotten."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import orjson
import pytest

from control.steered import Controlled, Steered, hung, steering
from plugged import until

pytestmark = pytest.mark.anyio

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"


class OpenRequests:
    """Requests under way, and their answers as they come."""

    def __init__(self, running: Controlled, tasks: anyio.abc.TaskGroup) -> None:
        self.answers: list[httpx.Response] = []
        self._running = running
        self._tasks = tasks

    async def waits(self, path: str = "/generate", method: str = "POST", **body: Any) -> None:
        """Ask, and return when the request stands at the gate."""
        gate = self._running.control.gate
        count = gate.waiting

        async def ask() -> None:
            self.answers.append(await self._running.client.request(method, path, json={"text": "x", **body}))

        self._tasks.start_soon(ask)
        await until(lambda: gate.waiting > count)


async def test_new_requests_wait_and_go_on_when_generation_does() -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        asked = OpenRequests(running, tasks)
        assert (await running.client.post(PAUSE, json={"mode": "retract"})).status_code == 200
        for _ in range(3):
            await asked.waits()
        await asked.waits("/v1/completions")
        await asked.waits(method="PUT")  # SGLang generates for both
        # Requests that do not generate pass, and those to the router's own routes.
        assert (await running.client.post("/tokenize", json={})).status_code == 200
        assert (await running.client.get("/health")).status_code == 200
        assert (await running.client.post("/flush_cache")).status_code == 200
        assert [each.in_flight for each in running.router.pool] == [0]
        assert worker.generated == 0
        assert (await running.client.post(CONTINUE, json={})).status_code == 200
        await until(lambda: len(asked.answers) == 5)
        assert [answer.status_code for answer in asked.answers] == [200] * 5
        assert worker.generated == 5
        assert running.control.gate.waiting == 0


async def test_requests_wait_from_the_moment_in_which_the_pause_begins() -> None:
    """Before the engines have answered: none may slip in between two of them."""
    slow = hung()
    async with steering(slow) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(running.client.post, PAUSE)
        await until(lambda: bool(slow.got))
        asked = OpenRequests(running, tasks)
        await asked.waits()
        assert slow.hold is not None
        slow.hold.set()
        await until(lambda: running.control.gate.closed)
        await running.client.post(CONTINUE, json={})
        await until(lambda: len(asked.answers) == 1)


async def test_who_waits_too_long_is_told_why() -> None:
    async with steering(Steered(), queue_s=0.1) as running:
        await running.client.post(PAUSE, json={})
        answer = await running.client.post("/generate", json={"text": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "message": "generation is paused, and did not continue within 0.1 s (--pause-queue-timeout-s)",
            "type": "service_unavailable",
            "code": "GENERATION_PAUSED",
        }
        assert running.control.gate.waiting == 0


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    worker = Steered()
    async with steering(worker) as running:
        await running.client.post(PAUSE, json={})
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/generate", json={"text": "x"}, timeout=0.3)
        await until(lambda: running.control.gate.waiting == 0)
        await running.client.post(CONTINUE, json={})
        assert (await running.client.post("/generate", json={"text": "x"})).status_code == 200
        assert worker.generated == 1


async def test_a_hung_worker_does_not_keep_the_others_from_going_on() -> None:
    good, stuck = Steered(), Steered()
    async with steering(good, stuck) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits()
        stuck.hold = anyio.Event()
        tasks.start_soon(running.client.post, CONTINUE)
        await until(lambda: len(asked.answers) == 1)
        stuck.hold.set()


async def test_a_worker_that_does_not_continue_gets_no_new_requests() -> None:
    good, bad = Steered(), Steered()
    bad.answers[CONTINUE] = (500, b"")
    async with steering(good, bad) as running:
        await running.client.post(PAUSE, json={})
        assert (await running.client.post(CONTINUE, json={})).status_code == 207
        assert running.router.pool.find(bad.url).state == "stale"
        assert running.router.pool.find(bad.url).weight_version == "default"  # that has not changed


async def test_a_pause_that_failed_everywhere_is_none() -> None:
    worker = Steered()
    worker.answers[PAUSE] = (500, b"")
    async with steering(worker) as running:
        assert (await running.client.post(PAUSE, json={})).status_code == 502
        assert (await running.client.post("/generate", json={"text": "x"})).status_code == 200


async def test_a_second_pause_that_fails_does_not_end_the_first() -> None:
    worker = Steered()
    async with steering(worker) as running:
        await running.client.post(PAUSE, json={})
        worker.answers[PAUSE] = (500, b"")
        await running.client.post(PAUSE, json={})
        assert running.control.gate.closed


async def test_a_pause_that_fails_late_does_not_undo_one_that_came_after() -> None:
    worker = hung()
    worker.answers[PAUSE] = (500, b"")
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(running.client.post, PAUSE)
        await until(lambda: bool(worker.got))
        hold, worker.hold = worker.hold, None
        await running.client.post(CONTINUE, json={})
        worker.answers.clear()
        await running.client.post(PAUSE, json={})
        worker.answers[PAUSE] = (500, b"")
        assert hold is not None
        hold.set()
        await anyio.wait_all_tasks_blocked()
        await running.client.post("/flush_cache")
        assert running.control.gate.closed


async def test_a_continue_that_failed_everywhere_can_be_asked_again() -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits()
        worker.answers[CONTINUE] = (500, b"")
        assert (await running.client.post(CONTINUE, json={})).status_code == 502
        assert running.control.gate.waiting == 1
        worker.answers.clear()
        await running.client.post(CONTINUE, json={})
        await until(lambda: len(asked.answers) == 1)


async def test_continuing_without_workers_frees_those_that_come() -> None:
    worker = Steered()
    async with steering(worker) as running:
        await running.client.post(PAUSE, json={})
        await running.client.post("/remove_worker", json={"url": worker.url})
        assert (await running.client.post(CONTINUE, json={})).status_code == 503
        await running.client.post("/add_worker", json={"url": worker.url})
        assert (await running.client.post("/generate", json={"text": "x"})).status_code == 200


# aborts of those that wait


async def test_an_abort_ends_those_whose_name_begins_so_and_no_others() -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits(rid="roll-1")
        await asked.waits(rid="other")
        await asked.waits()
        answer = await running.client.post("/abort_request", json={"rid": "roll"})
        assert answer.status_code == 200
        assert worker.bodies("/abort_request") == [{"rid": "roll"}]
        await until(lambda: len(asked.answers) == 1)
        assert asked.answers[0].json() == {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": "roll-1",
                "finish_reason": {"type": "abort", "message": "Aborted while generation was paused."},
                "completion_tokens": 0,
            },
        }
        assert running.control.gate.waiting == 2
        await running.client.post("/abort_request", json={"abort_all": True})
        await until(lambda: len(asked.answers) == 3)
        assert all(answer.json()["meta_info"]["id"] for answer in asked.answers)
        assert worker.generated == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"rid": ""}', b'{"rid": 7}', b'{"abort_all": false}'])
async def test_an_abort_that_means_nobody_ends_nobody(body: bytes) -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits(rid="r")
        await running.client.post("/abort_request", content=body)
        assert worker.got[-1] == ("POST", "/abort_request", body)
        await running.client.post(CONTINUE, json={})
        await until(lambda: len(asked.answers) == 1)
        assert asked.answers[0].json()["text"] == "said"


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"text": ["a", "b"], "rid": "r"}, ["r_0", "r_1"]),
        ({"text": ["a", "b"], "rid": ["p", "q"]}, ["p", "q"]),
        ({"text": "a", "rid": "r", "sampling_params": {"n": 3}}, ["r_0", "r_1", "r_2"]),
        ({"text": None, "input_ids": [[1], [2]], "rid": "r", "sampling_params": [{"n": 1}]}, ["r_0", "r_1"]),
        ({"input_embeds": [[[0.5, 1.5]], [[2.5, 3.5]]], "rid": "r", "text": None}, ["r_0", "r_1"]),
    ],
)
async def test_each_sequence_of_a_batch_is_answered(body: dict[str, Any], ids: list[str]) -> None:
    async with steering(Steered()) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits(**body)
        await asked.waits(stream=True, **body)
        await running.client.post("/abort_request", json={"abort_all": True})
        await until(lambda: len(asked.answers) == 2)
        for answer in asked.answers:
            streamed = answer.headers["content-type"] == "text/event-stream"
            outputs = answer.json() if not streamed else events(answer)
            assert [output["meta_info"]["id"] for output in outputs] == ids
            assert [output.get("index") for output in outputs] == (
                list(range(len(ids))) if streamed else [None] * len(ids)
            )


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *data, done, rest = answer.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in data]


async def test_nobody_is_listed_of_more_sequences_than_could_be() -> None:
    async with steering(Steered()) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits(text="a", sampling_params={"n": 10**12})
        await running.client.post("/abort_request", json={"abort_all": True})
        await until(lambda: len(asked.answers) == 1)
        assert (asked.answers[0].status_code, asked.answers[0].json()["error"]["code"]) == (400, "ABORTED")


async def test_a_batch_of_which_a_part_is_meant_waits_on() -> None:
    async with steering(Steered()) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits(text=["a", "b"], rid=["p", "q"])
        await running.client.post("/abort_request", json={"rid": "p"})
        assert running.control.gate.waiting == 1
        await running.client.post(CONTINUE, json={})
        await until(lambda: len(asked.answers) == 1)
        assert asked.answers[0].json()["text"] == "said"


async def test_other_requests_that_are_aborted_are_told_not_to_come_again() -> None:
    async with steering(Steered()) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        asked = OpenRequests(running, tasks)
        await asked.waits("/v1/completions", rid="r")
        await running.client.post("/abort_request", json={"rid": "r"})
        await until(lambda: len(asked.answers) == 1)
        assert asked.answers[0].status_code == 400
        assert asked.answers[0].json()["error"]["code"] == "ABORTED"


@pytest.mark.parametrize("body", [b"{", b"[]", b"7", b""])
async def test_a_body_that_is_no_request_waits_and_is_told_by_the_worker(body: bytes) -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        await running.client.post(PAUSE, json={})
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await running.client.post("/generate", content=body))

        tasks.start_soon(ask)
        await until(lambda: running.control.gate.waiting == 1)
        await running.client.post(CONTINUE, json={})
        await until(lambda: len(answers) == 1)
        assert worker.generated == 1


async def test_who_waits_when_the_router_is_told_to_end_is_told_so_at_once() -> None:
    async with steering(Steered()) as running:
        await running.client.post("/pause_generation", json={})
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await running.client.post("/generate", json={"text": "a"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: running.control.gate.waiting == 1)
            running.router.stop()
        await ask()  # one that comes later, on a connection that is open
        assert [answer.status_code for answer in answers] == [503, 503]
        assert {answer.json()["error"]["code"] for answer in answers} == {"SHUTTING_DOWN"}
        assert (await running.client.get("/readiness")).json()["reason"] == "the router is shutting down"
