"""One call reaches every worker, and the answer tells what each of them did."""

from __future__ import annotations

import tracemalloc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from control.steered import Steered, hung, steering
from core.servers import Wire, scripted, talk
from core.servers import answer as answering
from holding import drain, quarantine
from plugged import until
from ports import free_port
from router_core import SettingsError, Worker
from router_core.cli import build
from slime_control.calls.endpoints import CALLS
from slime_control.calls.fan_out import Answer, FanOut
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

UPDATE = "/update_weights_from_disk"


@pytest.mark.parametrize("path", CALLS)
async def test_each_call_reaches_all_workers_with_the_same_body(path: str) -> None:
    workers = [Steered(), Steered(), Steered()]
    async with steering(*workers) as running:
        body = b'{"new_version": "7", "weight_version": "7",  "odd": 1.50}'
        answer = await running.client.post(f"{path}?a=%2F&b", content=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["success"] is True
        assert answer.json()["message"] == f"{path}: 3 of 3 workers succeeded"
        done = {"success": True, "message": "done", "status": 200}
        assert answer.json()["workers"] == {worker.url: done for worker in workers}
    assert [worker.got for worker in workers] == [[("POST", path, body)]] * 3


async def test_all_workers_are_asked_at_once() -> None:
    workers = [hung() for _ in range(5)]
    async with steering(*workers) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(running.client.post, "/flush_cache")
        await until(lambda: all(worker.got for worker in workers))
        for worker in workers:
            assert worker.hold is not None
            worker.hold.set()


async def test_get_is_allowed_only_for_calls_that_sglang_answers_to_get() -> None:
    worker = Steered()
    async with steering(worker) as running:
        assert (await running.client.get("/flush_cache")).status_code == 200
        refused = await running.client.get("/pause_generation")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        refused = await running.client.delete("/flush_cache")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST")
    assert worker.got == [("GET", "/flush_cache", b"")]


async def test_headers_reach_the_workers_but_those_of_the_clients_connection() -> None:
    worker = Steered()
    async with steering(worker) as running:
        headers = {"authorization": "Bearer k", "x-mine": "1", "te": "trailers", "accept-encoding": "gzip"}
        await running.client.post("/abort_request", json={"rid": "r"}, headers=headers)
    (got,) = worker.headers
    assert (got["authorization"], got["x-mine"], got["content-length"]) == ("Bearer k", "1", "11")
    assert got["host"] == worker.url.removeprefix("http://")
    assert got["accept-encoding"] == "identity"
    assert "te" not in got


async def test_a_call_reaches_workers_as_it_was_written() -> None:
    """Not as a URL library would write it. What a ``Connection`` names ends here."""
    heads: list[bytes] = []

    async def serve(wire: Wire) -> None:
        while request := await wire.request():
            heads.append(request.line)
            assert not request.values(b"x-hop")
            await wire.send(answering(b'{"success": true}'))

    async with steering() as running, scripted(serve) as server:
        await running.router.add_worker(server.url)
        heads.clear()
        target = b"/flush_cache?a=%2f&b='|'&c=[%zz]&d=e+f%20g&h"
        reply = await talk(
            running.url,
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nX-Hop: 1\r\nConnection: close, X-Hop\r\n\r\n" % target,
        )
        assert reply.startswith(b"HTTP/1.1 200"), reply
    assert heads == [b"POST %b HTTP/1.1" % target]


async def test_a_call_in_another_transfer_coding_is_refused_and_pauses_nothing() -> None:
    worker = Steered()
    async with steering(worker) as running:
        reply = await talk(
            running.url,
            b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        )
        assert b" 400 " in reply.partition(b"\r\n")[0]
        assert not running.control.gate.closed
    assert worker.got == []


async def test_a_worker_gets_no_cookie_of_another_one() -> None:
    """Cookies know no ports: all workers of a host would share them."""

    async def serve(wire: Wire) -> None:
        while await wire.request():
            await wire.send(answering(b"{}", b"Set-Cookie: mine=secret; Path=/"))

    other = Steered()
    async with steering(other) as running, scripted(serve) as server:
        await running.router.add_worker(server.url)
        for _ in range(2):
            assert (await running.client.post("/flush_cache")).status_code == 200
    assert [headers.get("cookie") for headers in other.headers] == [None, None]


# who fails


async def test_a_worker_that_fails_an_update_gets_no_new_requests() -> None:
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = (500, b'{"success": false, "message": "no such file"}')
    async with steering(good, bad) as running:
        answer = await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"})
        assert answer.status_code == 207
        told = answer.json()
        assert told["success"] is False
        assert told["workers"][bad.url]["message"] == "no such file"
        assert told["workers"][bad.url]["status"] == 500
        assert f"1 of 2 workers succeeded; {bad.url}: it answered 500" in told["message"]
        shown = {each["url"]: each for each in (await running.client.get("/workers")).json()["workers"]}
        assert (shown[bad.url]["state"], shown[bad.url]["weight_version"]) == ("stale", None)
        assert (shown[good.url]["state"], shown[good.url]["weight_version"]) == ("ready", "7")
        for _ in range(10):
            await running.client.post("/generate", json={"text": "x"})
        assert (good.generated, bad.generated) == (10, 0)
        # Registered again, it has a fresh start.
        await running.client.post("/add_worker", json={"url": bad.url})
        assert running.router.pool.find(bad.url).state == "ready"


@pytest.mark.parametrize(
    ("status", "body", "trouble"),
    [
        (200, b"{not json", "it does not say that it succeeded"),
        (200, b"\xff\xfe", "it does not say that it succeeded"),
        (200, b"[1]", "it does not say that it succeeded"),
        (200, b'{"success": "true"}', "it does not say that it succeeded"),
        (200, b'{"success": false}', "it says that it did not succeed"),
        (200, b'{"a":' * 400 + b"1" + b"}" * 400, "it does not say that it succeeded"),
        (200, b" " * (2 << 20) + b'{"success": true}', "it does not say that it succeeded"),
        (204, b"", "it does not say that it succeeded"),
        (307, b"", "it answered 307"),
        (401, b"{}", "it answered 401"),
        (500, b"<html>", "it answered 500"),
    ],
)
async def test_no_update_is_taken_for_done_that_was_not_confirmed(
    status: int, body: bytes, trouble: str
) -> None:
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = (status, body)
    async with steering(good, bad) as running:
        answer = await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"})
        assert answer.status_code == 207
        assert answer.json()["message"].endswith(f"{bad.url}: {trouble}")
        assert running.router.pool.find(bad.url).state == "stale"


async def test_text_is_enough_where_sglang_answers_text() -> None:
    worker = Steered()
    worker.answers = {"/flush_cache": (200, b"Cache flushed.\n"), "/abort_request": (200, b"")}
    async with steering(worker) as running:
        flushed = await running.client.post("/flush_cache")
        assert flushed.json()["workers"] == {worker.url: {"message": "Cache flushed.", "status": 200}}
        aborted = await running.client.post("/abort_request", json={"abort_all": True})
        assert aborted.json()["workers"] == {worker.url: {"status": 200}}


async def test_dead_or_hanging_worker_delays_a_call_only_to_its_deadline() -> None:
    good, hanging = Steered(), hung()
    async with steering(good, hanging, timeout_s=0.3) as running:
        gone = f"http://127.0.0.1:{free_port()}"
        await running.router.add_worker(gone)
        began = anyio.current_time()
        answer = await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"})
        assert anyio.current_time() - began < 3
        assert answer.status_code == 207
        told = answer.json()["workers"]
        assert told[hanging.url] == {"status": 504, "error": "no answer within 0.3 s"}
        assert told[gone]["status"] == 502
        assert told[gone]["error"].startswith("ConnectError")
        assert [worker.state for worker in running.router.pool] == ["ready", "stale", "stale"]


async def test_when_all_fail_nobody_is_set_aside() -> None:
    workers = [Steered(), Steered()]
    for worker, status in zip(workers, (500, 400), strict=True):
        worker.answers[UPDATE] = (status, b'{"success": false}')
    async with steering(*workers) as running:
        answer = await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"})
        assert answer.status_code == 502
        assert answer.json()["success"] is False
        assert [worker.state for worker in running.router.pool] == ["ready", "ready"]
        assert running.router.weights.current == "default"


async def test_what_all_refuse_alike_has_their_status() -> None:
    workers = [Steered(), Steered()]
    for worker in workers:
        worker.answers["/flush_cache"] = (400, b"Cache not flushed.")
    async with steering(*workers) as running:
        assert (await running.client.post("/flush_cache")).status_code == 400
    async with steering(hung(), timeout_s=0.1) as running:
        assert (await running.client.post("/flush_cache")).status_code == 504


async def test_without_a_worker_it_is_503() -> None:
    async with steering() as running:
        answer = await running.client.post("/flush_cache")
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "message": "no worker is registered",
            "type": "service_unavailable",
            "code": "NO_WORKER",
        }


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/abort_request", "/start_profile", "/destroy_weights_update_group"]
)
async def test_a_worker_that_fails_what_does_not_change_its_answers_stays_in_use(path: str) -> None:
    good, busy = Steered(), Steered()
    busy.answers[path] = (400, b"busy")
    async with steering(good, busy) as running:
        assert (await running.client.post(path, json={})).status_code == 207
        assert [worker.state for worker in running.router.pool] == ["ready", "ready"]


async def test_those_that_get_no_requests_are_told_too() -> None:
    """A worker that may come back must have the weights."""
    workers = [Steered(), Steered(), Steered()]
    async with steering(*workers) as running:
        pool = running.router.pool
        quarantine(pool, pool.find(workers[1].url), "dead")
        drain(pool, pool.find(workers[2].url))
        answer = await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"})
        assert answer.status_code == 200
        assert [worker.version for worker in workers] == ["7"] * 3
        assert [worker.state for worker in pool] == ["ready", "quarantined", "draining"]
        workers[2].answers[UPDATE] = (500, b"")
        await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "8"})
        assert [worker.state for worker in pool] == ["ready", "quarantined", "draining"]


async def test_a_call_goes_on_when_its_caller_leaves() -> None:
    fast, slow = Steered(), hung()
    async with steering(fast, slow) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post(UPDATE, json={"model_path": "/m", "weight_version": "7"}, timeout=0.3)
        assert slow.hold is not None
        slow.hold.set()
        await until(lambda: running.router.weights.current == "7")
        assert slow.version == "7"


async def test_a_call_that_outlasts_the_router_is_told_so(start: Start) -> None:
    worker = hung()
    answers: list[httpx.Response] = []
    async with serving(worker.app, grace_s=0.1) as url, anyio.create_task_group() as tasks:
        async with start("--plugin", "control", "--worker-urls", url, grace_s=0.2) as running:

            async def call() -> None:
                async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
                    answers.append(await client.post(f"{running.url}/flush_cache"))

            tasks.start_soon(call)
            await until(lambda: bool(worker.got))
        await until(lambda: bool(answers))
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "SHUTTING_DOWN"


async def test_what_nobody_foresaw_is_a_500_that_names_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret")

    worker = Steered()
    async with steering(worker) as running:
        monkeypatch.setattr(FanOut, "send", broken)
        answer = await running.client.post("/flush_cache")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "PLUGIN_FAILED"
        assert "secret" not in answer.text
        monkeypatch.undo()
        assert (await running.client.post("/flush_cache")).status_code == 200


# a body for each worker


async def test_each_worker_gets_its_own_body_and_others_none() -> None:
    one, two, three = Steered(), Steered(), Steered()
    async with steering(one, two, three) as running:
        bodies = {one.url: {"handle": "a"}, two.url + "/": {"handle": "b"}}
        answer = await running.client.post("/init_weights_update_group", json={"workers": bodies})
        assert set(answer.json()["workers"]) == {one.url, two.url}
    path = "/init_weights_update_group"
    assert (one.bodies(path), two.bodies(path), three.got) == ([{"handle": "a"}], [{"handle": "b"}], [])


@pytest.mark.parametrize("body", [{"tags": ["workers"]}, {"a": {"workers": {}}}, ["workers"]])
async def test_workers_that_stand_elsewhere_in_a_body_mean_nothing(body: object) -> None:
    worker = Steered()
    async with steering(worker, Steered()) as running:
        assert (await running.client.post("/start_profile", json=body)).status_code == 200
    assert worker.bodies("/start_profile") == [body]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"workers": {}}, 400),
        ({"workers": []}, 400),
        ({"workers": {"http://127.0.0.1:9": {}}}, 404),
        ({"workers": {"nonsense": {}}}, 400),
        ({"workers": {"URL": 7}}, 400),
        ({"workers": {"URL": {}, "URL/": {}}}, 400),
        ({"workers": {"URL": {}}, "group_name": "g"}, 400),
    ],
)
async def test_a_body_for_each_worker_that_cannot_be_reaches_nobody(
    body: dict[str, object], status: int
) -> None:
    worker = Steered()
    async with steering(worker) as running:
        given = body["workers"]
        if isinstance(given, dict):
            body = {**body, "workers": {url.replace("URL", worker.url): one for url, one in given.items()}}
        answer = await running.client.post("/init_weights_update_group", json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    assert worker.got == []


@pytest.mark.parametrize("version", ["", "7" * 257, 7.5, False, ["7"]])
@pytest.mark.parametrize("for_each", [False, True])
async def test_a_call_that_names_no_version_reaches_nobody(version: object, for_each: bool) -> None:
    worker = Steered()
    async with steering(worker) as running:
        body = {"model_path": "m", "weight_version": version}
        sent = {"workers": {worker.url: body}} if for_each else body
        answer = await running.client.post("/update_weights_from_disk", json=sent)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith('weight_version: wanted a version such as "7"')
        renamed = await running.client.post("/update_weight_version", json={"new_version": ""})
        assert renamed.status_code == 400, renamed.text
    assert worker.got == []


async def test_ranks_begin_where_those_of_the_worker_before_end() -> None:
    workers = [Steered(tp_size=2), Steered(tp_size=4), Steered(tp_size=1)]
    path = "/init_weights_update_group"
    async with steering(*workers) as running:
        base = {"master_address": "10.0.0.1", "rank_offset": 1, "world_size": 8, "group_name": "g"}
        assert (await running.client.post(path, json=base)).status_code == 200
        for worker, offset in zip(workers, (1, 3, 7), strict=True):
            assert worker.bodies(path) == [base | {"rank_offset": offset}]
        answer = await running.client.post(path, json=base | {"world_size": 7})
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert "world_size: wanted at least 8 for the ranks of all workers" in told
        assert "got 7; raise it" in told
        answer = await running.client.post(path, json=base | {"rank_offset": "1"})
        assert answer.status_code == 400
    assert all(len(worker.got) == 1 for worker in workers)


@pytest.mark.parametrize("tp_size", [None, 0, True, "2"])
async def test_nobody_is_called_to_a_group_whose_ranks_cannot_be_counted(tp_size: object) -> None:
    known, unknown = Steered(tp_size=2), Steered(tp_size=tp_size)
    async with steering(known, unknown) as running:
        answer = await running.client.post("/init_weights_update_group", json={"rank_offset": 1})
        assert answer.status_code == 502
        assert f"{unknown.url} does not say its tp_size" in answer.json()["error"]["message"]
    assert known.got == unknown.got == []


# large bodies


async def test_a_large_body_is_held_once_however_many_workers_there_are() -> None:
    """Each worker reads it slowly; the copies on the way are pieces."""
    size, count = 64 << 20, 8
    body = bytes(size)
    release = anyio.Event()
    received = [0] * count

    async def serve(number: int, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            received[number] = len(head.partition(b"\r\n\r\n")[2])
            await release.wait()
            while received[number] < size:
                received[number] += len(await stream.receive())
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n" + b'{"success": true}')

    answers: list[Answer] = []
    async with (
        AsyncExitStack() as stack,
        anyio.create_task_group() as tasks,
        FanOut(httpx.AsyncHTTPTransport(), 60, 5) as fan_out,
    ):
        bodies = {}
        for number in range(count):
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
            stack.push_async_callback(listener.aclose)
            tasks.start_soon(listener.serve, lambda stream, number=number: serve(number, stream))
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            bodies[Worker(f"http://127.0.0.1:{port}")] = body
        call = CALLS["/update_weights_from_tensor"]
        tracemalloc.start()
        try:
            async with anyio.create_task_group() as sending:
                sending.start_soon(
                    fan_out.send,
                    call,
                    "POST",
                    call.path.encode(),
                    [],
                    bodies,
                    lambda _, answer: answers.append(answer),
                )
                await until(lambda: all(received))
                release.set()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        tasks.cancel_scope.cancel()
    assert [answer.trouble for answer in answers] == [None] * count
    assert received == [size] * count
    assert peak < size / 2


# flags


@pytest.mark.parametrize("flag", ["--control-timeout-s", "--pause-queue-timeout-s"])
def test_a_deadline_that_cannot_be_is_told(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}: wanted a number above 0, got 0"):
        build(["--plugin", "control", flag, "0"])
