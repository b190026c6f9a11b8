"""Faults of the first generation in its proxy, each over a real socket. The numbers are those of the list of faults."""

from __future__ import annotations

import asyncio

import anyio
import httpx
import orjson
import pytest

from core.servers import Wire, answer, dial, scripted
from deadlines import HANG_S, until
from holding import quarantine
from plugged import Recording, routing
from router_core import Exchange, hookimpl
from routers import BARE, Start
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio


def in_flight(running: Running) -> list[int]:
    return [worker.in_flight for worker in running.router.pool]


class Rewriter:
    """Replaces each body by the same JSON, which is spelt in other bytes."""

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        exchange.request.replace_json(exchange.request.json())

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        document = orjson.loads(await exchange.reply.read())
        exchange.reply.replace_body(orjson.dumps(document, option=orjson.OPT_INDENT_2))


@pytest.mark.parametrize("body", [b'{"a": 1}', b'{"a":-1e-5}', b'{"a":"\\u00e9"}', '{"a":"é"}'.encode()])
async def test_pitfall_10_an_edited_body_has_its_own_length(body: bytes) -> None:
    worker = Recording()
    async with routing({"rewriter": Rewriter()}, worker) as running:
        for _ in range(2):  # the second one on the same connections: the first one's length was right
            reply = await running.client.post("/generate", content=body)
            assert reply.json() == {"worker": "worker"}
            assert reply.headers.get_list("content-length") == [str(len(reply.content))]
        _, headers, arrived = worker.requests[-1]
        assert orjson.loads(arrived) == orjson.loads(body)
        assert arrived != body or body == b'{"a":"\xc3\xa9"}'
        assert headers["content-length"] == str(len(arrived))


@pytest.mark.parametrize(("levels", "status"), [(254, 200), (255, 400), (1000, 400)])
async def test_an_edited_body_that_is_nested_too_deeply_is_a_400(levels: int, status: int) -> None:
    class Reader:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            exchange.request.replace_json(exchange.request.json())

    async with routing({"reader": Reader()}, Recording()) as running:
        reply = await running.client.post("/generate", content=b"[" * levels + b"]" * levels)
        assert reply.status_code == status
        if status == 400:
            assert reply.json()["error"]["message"] == (
                "the body is nested too deeply: at most 254 levels can be passed on"
            )
        assert in_flight(running) == [0]


async def test_pitfall_11_query_headers_method_and_host_are_those_they_should_be(start: Start) -> None:
    async def echo(wire: Wire) -> None:
        while request := await wire.request():
            lines = [request.line, *(name + b": " + value for name, value in request.headers)]
            await wire.send(answer(b"\n".join(lines), b"X-Twice: 1", b"X-Twice: 2"))

    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        headers = [("x-a", "1"), ("x-b", "2"), ("x-a", "3")]
        for method in ("GET", "POST", "DELETE"):
            reply = await running.client.request(method, "/path?q=%2F&q=b", headers=headers)
            line, *arrived = reply.text.split("\n")
            assert line == f"{method} /path?q=%2F&q=b HTTP/1.1"
            assert [item for item in arrived if item.startswith("x-")] == ["x-a: 1", "x-b: 2", "x-a: 3"]
            assert [item for item in arrived if item.startswith("host")] == [f"host: {worker.url[7:]}"]
            assert reply.headers.get_list("x-twice") == ["1", "2"]


async def test_pitfall_12_disconnected_client_is_not_counted_or_generated_for(
    start: Start,
) -> None:
    generating, ended = asyncio.Event(), asyncio.Event()

    async def engine(wire: Wire) -> None:
        await wire.request()
        generating.set()
        await wire.until_closed()
        ended.set()

    loop = asyncio.get_running_loop()
    async with scripted(engine) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        raw = await dial(running.url)
        await loop.sock_sendall(raw, head + bytes(500))  # while uploading
        await anyio.sleep(0.05)
        raw.close()
        await anyio.sleep(0.05)
        assert in_flight(running) == [0]
        assert worker.accepted == 0

        raw = await dial(running.url)
        await loop.sock_sendall(raw, head + bytes(1000))  # and later
        await generating.wait()
        assert in_flight(running) == [1]
        raw.close()
        with anyio.fail_after(HANG_S):
            await ended.wait()
        await until(lambda: in_flight(running) == [0])


async def test_pitfall_13_load_is_released_only_when_the_stream_has_ended(start: Start) -> None:
    go_on = asyncio.Event()

    async def stream(wire: Wire) -> None:
        while await wire.request():
            await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
            await go_on.wait()
            await wire.send(b"0\r\n\r\n")

    async with scripted(stream) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        async with running.client.stream("GET", "/") as reply:
            assert await anext(reply.aiter_bytes()) == b"data: 1\n\n"
            assert in_flight(running) == [1]
            listed = (await running.client.get("/workers")).json()["workers"]
            assert [entry["load"] for entry in listed] == [1]
            go_on.set()
        await until(lambda: in_flight(running) == [0])


async def test_pitfall_14_workers_die_come_back_and_leave(start: Start) -> None:
    worker = Recording("phoenix")
    async with start(*BARE) as running:
        nobody = await running.client.post("/generate", json={"text": "hello"})
        assert (nobody.status_code, nobody.headers["content-type"]) == (503, "application/json")
        assert nobody.json()["error"]["code"] == "NO_WORKER"

        async with serving(worker) as url:
            await running.client.post("/add_worker", params={"url": url})
            assert (await running.client.get("/")).json() == {"worker": "phoenix"}
        quarantine(running.router.pool, running.router.pool.find(url), "dead")  # it is dead
        assert (await running.client.get("/")).status_code == 503
        async with serving(worker, port=int(url.rpartition(":")[2])):
            await running.client.post("/add_worker", params={"url": url})
            assert (await running.client.get("/")).json() == {"worker": "phoenix"}

            async with running.client.stream("GET", "/stream") as reply:
                assert (await running.client.post("/remove_worker", params={"url": url})).status_code == 200
                assert await reply.aread() == b"one two three"
            assert (await running.client.get("/")).status_code == 503


async def test_pitfall_15_connection_closed_as_it_is_reused_fails_no_request(start: Start) -> None:
    async def closing(wire: Wire) -> None:
        request = await wire.request()
        if request is not None:
            await wire.send(answer(request.body))
            await wire.head()  # the next request is on its way when the connection closes

    async with scripted(closing) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for number in range(10):
            reply = await running.client.post("/", content=b"%d" % number)
            assert (reply.status_code, reply.content) == (200, b"%d" % number)
        assert worker.accepted == 10


async def test_pitfall_16_proxies_of_the_environment_see_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(wire: Wire) -> None:
        while request := await wire.request():
            await wire.send(answer(request.line))

    async with scripted(echo) as proxy, scripted(echo) as worker:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        async with start(*BARE, "--worker-urls", worker.url) as running:
            assert (await running.client.get("/path")).content == b"GET /path HTTP/1.1"
            await until(lambda: running.router.pool.healthy == 1)  # the probe went straight as well
        assert proxy.accepted == 0
        assert proxy.probed == 0


async def test_pitfall_17_a_fast_worker_waits_for_a_slow_client(start: Start) -> None:
    sent = 0

    async def fast(wire: Wire) -> None:
        nonlocal sent
        if await wire.request() is not None:
            wire.buffers(64 * 1024)
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
            while await wire.send(bytes(1 << 20)):
                sent += 1 << 20

    async with scripted(fast) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with await dial(running.url, receive_buffer=64 * 1024) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            before = -1
            while before < sent:
                before = sent
                await anyio.sleep(0.3)
            assert 0 < sent < 32 << 20  # nearly all of it in the kernel's buffers
        await until(lambda: in_flight(running) == [0])


async def test_pitfall_18_a_silent_worker_holds_a_relay_for_its_deadline_only(start: Start) -> None:
    async def silent(wire: Wire) -> None:
        request = await wire.request()
        if request is not None and b"/half" in request.line:
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        await wire.until_closed()

    flags = ("--request-timeout-secs", "0.3", "--stream-silence-timeout-secs", "0.3")
    async with scripted(silent) as worker, start(*BARE, *flags, "--worker-urls", worker.url) as running:
        with anyio.fail_after(HANG_S):
            assert (await running.client.get("/")).status_code == 504
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete|without sending complete"):  # noqa: RUF043
                await running.client.get("/half")
        assert in_flight(running) == [0]
        assert running.router.proxy.open_connections == 0


async def test_pitfall_19_a_request_that_is_sent_again_still_has_its_body(start: Start) -> None:
    body = bytes(range(256)) * 8192  # 2 MiB: more than is sent in one go

    async def closing(wire: Wire) -> None:
        if request := await wire.request():
            await wire.send(answer(request.body))
            await wire.request()  # read to its end, and closed on

    async with scripted(closing) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for _ in range(3):
            assert (await running.client.post("/", content=body)).content == body
        assert [request.body == body for request in worker.arrived] == [
            True
        ] * 5  # 1 + 2 × (lost, sent again)


async def test_pitfall_20_probes_do_not_wait_for_the_traffics_connections(start: Start) -> None:
    busy = 150  # more than the probes' client would open in all

    async def engine(wire: Wire) -> None:
        if await wire.request() is not None:
            await wire.until_closed()

    flags = ("--health-check-interval-secs", "0.05", "--health-check-timeout-secs", "1")
    async with scripted(engine) as worker, start(*flags, "--worker-urls", worker.url) as running:
        await until(lambda: running.router.pool.healthy == 1)
        sockets = [await dial(running.url) for _ in range(busy)]
        for raw in sockets:
            await asyncio.get_running_loop().sock_sendall(raw, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: in_flight(running) == [busy])
        probed = worker.probed
        await until(lambda: worker.probed > probed + 5)
        assert running.router.pool.healthy == 1
        for raw in sockets:
            raw.close()
        await until(lambda: in_flight(running) == [0])
