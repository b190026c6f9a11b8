"""The fleet's version moves once for each version, in order, and only when those who serve have it."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from control.steered import Controlled, Steered, hung, steering
from plugged import until
from router_core import hookimpl
from router_core.weights import WeightUpdate
from slime_control.calls.endpoints import CALLS

pytestmark = pytest.mark.anyio

DISK = "/update_weights_from_disk"


class ToldPlugin:
    """A plugin that keeps what it is told; it may fail."""

    def __init__(self) -> None:
        self.updates: list[tuple[str | None, str, str]] = []
        self.fails = False

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self.updates.append((update.previous, update.version, update.source))
        if self.fails:
            raise RuntimeError("no")


def shown(running: Controlled) -> list[tuple[str, str | None]]:
    return [(worker.state, worker.weight_version) for worker in running.router.pool]


@pytest.mark.parametrize("path", [path for path, call in CALLS.items() if call.names_version])
async def test_every_kind_of_update_is_announced_once_and_before_the_answer(path: str) -> None:
    told = ToldPlugin()
    async with steering(Steered(), Steered(), beside={"told": told}) as running:
        for version in ("1", "1", "2"):  # an update in several pieces names its version with each
            body = {"weight_version": version, "new_version": version}
            assert (await running.client.post(path, json=body)).status_code == 200
            assert told.updates[-1][1] == version
        assert told.updates == [("default", "1", path), ("1", "2", path)]
        assert shown(running) == [("ready", "2")] * 2
        assert (await running.client.get("/weight_version")).json()["weight_version"] == "2"


async def test_a_number_is_a_version_too() -> None:
    told = ToldPlugin()
    async with steering(Steered(), beside={"told": told}) as running:
        await running.client.post(DISK, json={"weight_version": 7})
        assert told.updates == [("default", "7", DISK)]


async def test_without_a_version_the_workers_are_asked() -> None:
    told = ToldPlugin()
    worker = Steered()
    async with steering(worker, beside={"told": told}) as running:
        await running.client.post(DISK, json={"model_path": "/m"})
        assert told.updates == []  # by name nothing has changed
        worker.version = "9"
        await running.client.post(DISK, json={"model_path": "/m"})
        assert told.updates == [("default", "9", DISK)]


async def test_a_version_that_is_null_is_as_if_there_were_none() -> None:
    told = ToldPlugin()
    worker = Steered()
    async with steering(worker, beside={"told": told}) as running:
        worker.answers[DISK] = (200, b'{"success": true}')
        worker.version = "9"
        await running.client.post(DISK, json={"weight_version": None})
        assert told.updates == [("default", "9", DISK)]


async def test_an_old_engine_is_asked_by_the_old_name() -> None:
    told = ToldPlugin()
    worker = Steered()
    async with steering(worker, beside={"told": told}) as running:
        worker.version, worker.answers["/model_info"] = "9", (404, b"")
        await running.client.post(DISK, json={"model_path": "/m"})
        assert told.updates == [("default", "9", DISK)]
        worker.answers["/get_model_info"] = (404, b"")
        assert (await running.client.post(DISK, json={"model_path": "/m"})).status_code == 502


async def test_a_worker_that_dies_after_its_update_is_stale() -> None:
    """Between its answer and the question what it has now."""
    good = Steered()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if (await stream.receive()).startswith(b"POST"):
                await stream.send(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"success": true}')

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener,
        steering(good) as running,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, serve)
        dying = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        await running.router.add_worker(dying)
        answer = await running.client.post(DISK, json={"model_path": "/m"})
        assert answer.status_code == 207
        assert "does not say which weights" in answer.json()["workers"][dying]["error"]
        assert running.router.pool.find(dying).state == "stale"
        tasks.cancel_scope.cancel()


async def test_a_large_body_is_not_parsed_for_its_version() -> None:
    told = ToldPlugin()
    async with steering(Steered(), Steered(), beside={"told": told}) as running:
        body = b'{"serialized": "%s", "weight_version": "8"}' % (b"A" * (2 << 20))
        assert (await running.client.post("/update_weights_from_tensor", content=body)).status_code == 200
        assert told.updates == [("default", "8", "/update_weights_from_tensor")]


async def test_workers_that_name_several_versions_move_nothing() -> None:
    told = ToldPlugin()
    one, two = Steered("1"), Steered("2")
    async with steering(one, two, beside={"told": told}) as running:
        answer = await running.client.post(DISK, json={"model_path": "/m"})
        assert answer.json()["message"].endswith(
            "; the workers report different versions, so the fleet's version has not moved"
        )
        assert told.updates == []
        assert shown(running) == [("ready", "1"), ("ready", "2")]


@pytest.mark.parametrize("info", [(500, b""), (200, b"{"), (200, b"[]"), (200, b'{"weight_version": true}')])
async def test_a_worker_that_does_not_say_what_it_has_is_stale(info: tuple[int, bytes]) -> None:
    told = ToldPlugin()
    good, dumb = Steered(), Steered()
    async with steering(good, dumb, beside={"told": told}) as running:
        good.version, dumb.answers["/model_info"] = "5", info
        answer = await running.client.post(DISK, json={"model_path": "/m"})
        assert answer.status_code == 207
        assert "does not say which weights" in answer.json()["workers"][dumb.url]["error"]
        assert told.updates == [("default", "5", DISK)]
        assert shown(running) == [("ready", "5"), ("stale", None)]


async def test_worker_by_worker_the_last_one_moves_the_fleet() -> None:
    told = ToldPlugin()
    one, two = Steered(), Steered()
    async with steering(one, two, beside={"told": told}) as running:
        body = {"weight_version": "3"}
        await running.client.post(DISK, json={"workers": {one.url: body}})
        assert told.updates == []
        assert shown(running) == [("ready", "3"), ("ready", "default")]
        await running.client.post(DISK, json={"workers": {two.url: body}})
        assert told.updates == [("default", "3", DISK)]


async def test_version_of_a_worker_that_missed_it_is_not_the_fleets() -> None:
    told = ToldPlugin()
    good, bad = Steered(), Steered()
    bad.answers[DISK] = (500, b"")
    async with steering(good, bad, beside={"told": told}) as running:
        await running.client.post(DISK, json={"weight_version": "3"})
        assert shown(running) == [("ready", "3"), ("stale", None)]
        assert told.updates == [("default", "3", DISK)]
        versions = (await running.client.get("/weight_version")).json()["workers"]
        assert versions == {good.url: "3", bad.url: None}


async def test_who_registers_during_an_update_with_old_weights_gets_no_requests() -> None:
    slow, newcomer, fresh = hung(), Steered(), Steered("3")
    told = ToldPlugin()
    async with (
        steering(slow, newcomer, fresh, beside={"told": told}) as running,
        anyio.create_task_group() as tasks,
    ):
        for late in (newcomer, fresh):
            await running.client.post("/remove_worker", json={"url": late.url})

        async def update() -> None:
            answer = await running.client.post(DISK, json={"weight_version": "3"})
            assert answer.status_code == 200

        tasks.start_soon(update)
        await until(lambda: bool(slow.got))
        for late in (newcomer, fresh):
            await running.client.post("/add_worker", json={"url": late.url})
        assert slow.hold is not None
        slow.hold.set()
        await until(lambda: told.updates == [("default", "3", DISK)])
        assert shown(running) == [("ready", "3"), ("stale", "default"), ("ready", "3")]


async def test_an_update_that_ends_late_does_not_move_the_fleet_back() -> None:
    told = ToldPlugin()
    slow = hung()
    async with steering(slow, beside={"told": told}) as running, anyio.create_task_group() as tasks:
        late: list[int] = []

        async def update() -> None:
            late.append((await running.client.post(DISK, json={"weight_version": "3"})).status_code)

        tasks.start_soon(update)
        await until(lambda: bool(slow.got))
        hold, slow.hold = slow.hold, None
        await running.client.post(DISK, json={"weight_version": "4"})
        assert hold is not None
        hold.set()
        await until(lambda: late == [200])
        assert told.updates == [("default", "4", DISK)]


async def test_concurrent_pieces_out_of_order_set_no_worker_aside_early() -> None:
    class Slow:
        def __init__(self) -> None:
            self.is_told, self.goes_on = anyio.Event(), anyio.Event()

        @hookimpl
        async def on_weight_update(self) -> None:
            self.is_told.set()
            await self.goes_on.wait()

    worker, slow, held, ended = Steered("7"), Slow(), anyio.Event(), anyio.Event()
    async with steering(worker, beside={"slow": slow}) as running, anyio.create_task_group() as tasks:
        [there] = running.router.pool

        async def piece() -> None:
            body = {"weight_version": "8"}
            assert (await running.client.post("/update_weights_from_tensor", json=body)).status_code == 200
            ended.set()

        tasks.start_soon(running.router.announce_weights, "before", "a trainer")
        await slow.is_told.wait()  # so "8" has to wait for its turn
        worker.hold = held
        tasks.start_soon(piece)
        await until(lambda: len(worker.got) == 1)
        worker.hold = None
        tasks.start_soon(piece)
        await until(lambda: there.weight_version == "8")
        await anyio.wait_all_tasks_blocked()
        held.set()
        await ended.wait()
        assert there.state == "ready"
        slow.goes_on.set()


async def test_worker_that_took_an_older_update_last_is_set_aside() -> None:
    slow, newcomer = hung(), Steered()
    async with steering(slow, newcomer) as running, anyio.create_task_group() as tasks:
        await running.client.post("/remove_worker", json={"url": newcomer.url})
        late: list[int] = []

        async def update() -> None:
            late.append((await running.client.post(DISK, json={"weight_version": "3"})).status_code)

        tasks.start_soon(update)
        await until(lambda: bool(slow.got))
        await running.client.post("/add_worker", json={"url": newcomer.url})
        hold, slow.hold = slow.hold, None
        await running.client.post(DISK, json={"weight_version": "4"})
        assert hold is not None
        hold.set()
        await until(lambda: late == [200])
        assert shown(running) == [("stale", "3"), ("ready", "4")]


async def test_worker_reregistered_during_an_update_it_took_delays_no_request() -> None:
    """It was started anew, and has lost what it took."""
    told = ToldPlugin()
    slow, anew = hung(), Steered()
    async with (
        steering(slow, anew, beside={"told": told}) as running,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(running.client.post, DISK, json={"weight_version": "3"}))
        await until(lambda: bool(slow.got) and running.router.pool.find(anew.url).weight_version == "3")
        anew.version = "default"
        await running.client.post("/add_worker", json={"url": anew.url})
        assert slow.hold is not None
        slow.hold.set()
        await until(lambda: told.updates == [("default", "3", DISK)])
        assert shown(running) == [("ready", "3"), ("stale", "default")]


async def test_a_plugin_that_fails_is_told_of_and_the_version_stands() -> None:
    told = ToldPlugin()
    told.fails = True
    good, bad = Steered(), Steered()
    bad.answers[DISK] = (500, b"")
    async with steering(good, bad, beside={"told": told}) as running:
        answer = await running.client.post(DISK, json={"weight_version": "3"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "PLUGIN_FAILED"
        assert running.router.weights.current == "3"
        assert shown(running) == [("ready", "3"), ("stale", None)]


async def test_a_body_that_is_no_json_reaches_nobody() -> None:
    worker = Steered()
    async with steering(worker) as running:
        assert (await running.client.post(DISK, content=b"{")).status_code == 400
    assert worker.got == []
