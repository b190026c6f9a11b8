"""The byte path in front of servers that nobody here wrote: the same answers with the router as without it."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import httpx
import pytest

from core.asgi_worker import EVENTS
from core.real import nginx, on_aiohttp, on_granian, on_nginx, on_uvicorn
from core.servers import Wire, answer, content, scripted, talk
from deadlines import HANG_S
from routers import BARE, Start

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})]),
]

#: Of one hop, or of one moment.
NOT_COMPARED = {b"connection", b"date", b"keep-alive", b"transfer-encoding"}


@pytest.fixture(scope="module", params=["uvicorn-h11", "uvicorn-httptools", "aiohttp", "granian", "nginx"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    servers: dict[str, AbstractContextManager[str]] = {
        "uvicorn-h11": on_uvicorn("h11"),
        "uvicorn-httptools": on_uvicorn("httptools"),
        "aiohttp": on_aiohttp(),
        "granian": on_granian(),
        "nginx": on_nginx(tmp_path_factory.mktemp("nginx")),
    }
    with servers[request.param] as url:
        yield url


def end_to_end(reply: httpx.Response) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the parts that must arrive unchanged: status, headers in their order, body."""
    headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in NOT_COMPARED]
    return reply.status_code, headers, reply.content


async def test_answers_are_the_same_as_without_the_router(start: Start, worker: str) -> None:
    asked = [
        ("GET", "/twice", b""),
        ("HEAD", "/twice", b""),
        ("GET", "/chunked", b""),
        ("HEAD", "/chunked", b""),
        ("POST", "/chunked", b"x" * 120_000),
        ("GET", "/echo", b""),
        ("POST", "/echo", b""),
        ("POST", "/echo", b'{"a": 1}'),
        ("POST", "/echo", '{"text": "é", "logprob": -1e-5}'.encode()),
        ("PUT", "/echo", bytes(range(256))),
        *(
            ("GET", f"/status/{status}", b"")
            for status in (200, 201, 204, 301, 304, 400, 401, 404, 429, 500, 503)
        ),
        *(("POST", f"/status/{status}", b"{}") for status in (204, 400, 500, 503)),
        ("HEAD", "/status/404", b""),
    ]
    async with (
        start(*BARE, "--worker-urls", worker) as running,
        httpx.AsyncClient(trust_env=False, timeout=HANG_S) as direct,
    ):
        for method, path, body in asked:
            expected = await direct.request(method, worker + path, content=body)
            reply = await running.client.request(method, path, content=body)
            assert end_to_end(reply) == end_to_end(expected), (method, path)
        assert [worker.in_flight for worker in running.router.pool] == [0]


TARGETS = [
    b"/a%20b/%C3%A9;v=1?x=%2F&y=1&&z=a+b&empty=&flag&pct=%25",
    b"/x//y/../z/.?a=1?b=2",
    b"/generate?q=" + b"v" * 6000,
    b"/~user/:colon@at!$&'()*,=-._?%F0%9F%98%80",
]


async def test_requests_arrive_as_without_the_router(start: Start, worker: str) -> None:
    raw = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nX-A: 1\r\nCookie: a=1\r\nx-a: 2\r\n"
        b"X-Latin: \xe9\r\nContent-Type: application/json\r\nX-Empty:\r\nContent-Length: 8\r\nConnection: close\r\n"
        b'\r\n{"a": 1}'
    )
    differs = {"host", "connection", "content-length"}
    async with start(*BARE, "--worker-urls", worker) as running:
        for target in TARGETS:
            expected = json.loads(content(await talk(worker, raw % target)))
            arrived = json.loads(content(await talk(running.url, raw % target)))
            for field in ("method", "target", "body_bytes"):
                assert arrived[field] == expected[field]
            mine, theirs = (
                [pair for pair in reply["headers"] if pair[0] not in differs] for reply in (arrived, expected)
            )
            assert mine == theirs
            assert ["x-a", "2"] in mine


async def test_methods_stay_what_they_were(start: Start, worker: str) -> None:
    async with start(*BARE, "--worker-urls", worker) as running:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for body in (b"", b"body"):
                seen = (await running.client.request(method, "/m", content=body)).json()
                assert (seen["method"], seen["body_bytes"]) == (method, len(body))


async def test_hop_by_hop_headers_end_at_the_router(start: Start, worker: str) -> None:
    raw = (
        b"GET /seen HTTP/1.1\r\nHost: localhost\r\nX-Hop: 1\r\nX-Stays: 1\r\nConnection: close, X-Hop\r\n"
        b"Keep-Alive: timeout=5\r\nProxy-Authorization: secret\r\nProxy-Connection: close\r\nTE: trailers\r\n"
        b"Trailer: X-T\r\n\r\n"
    )
    async with start(*BARE, "--worker-urls", worker) as running:
        headers = dict(json.loads(content(await talk(running.url, raw)))["headers"])
        assert headers.pop("x-stays") == "1"
        assert headers.pop("host") != "router"
        assert headers in ({}, {"connection": "close"})  # which is nginx's, to the server behind it


async def test_large_bodies_pass_both_ways(start: Start, worker: str) -> None:
    body = random.Random(7).randbytes(5 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 300_000):
            yield body[begin : begin + 300_000]

    async with start(*BARE, "--worker-urls", worker) as running:
        for path in ("/echo", "/chunked"):
            for upload in (body, pieces()):  # with a length, and chunked
                reply = await running.client.post(path, content=upload)
                assert hashlib.sha256(reply.content).digest() == hashlib.sha256(body).digest()


async def test_a_stream_arrives_piece_by_piece(start: Start, worker: str) -> None:
    async with (
        start(*BARE, "--worker-urls", worker) as running,
        httpx.AsyncClient(base_url=worker, trust_env=False, timeout=HANG_S) as direct,
        running.client.stream("GET", "/events") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        pieces = stream.aiter_raw()
        for event in EVENTS:  # the worker sends an event only when the one before it has been read here
            await direct.get("/next")
            received = b""
            with anyio.fail_after(HANG_S):
                while len(received) < len(event):
                    received += await anext(pieces)
            assert received == event
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


async def test_connections_are_used_again(start: Start, worker: str) -> None:
    async with start(*BARE, "--worker-urls", worker) as running:
        ports = {(await running.client.get("/peer")).text for _ in range(10)}
        assert len(ports) == 1
        await running.client.head(
            "/peer"
        )  # whose end the parser cannot see: the one connection that is given up
        assert len({(await running.client.get("/peer")).text for _ in range(3)} - ports) == 1
        assert running.router.proxy.open_connections == 1


@pytest.mark.parametrize("server", ["uvicorn-h11", "uvicorn-httptools", "aiohttp"])
async def test_a_worker_that_closes_idle_connections_just_then_loses_nothing(
    start: Start, server: str
) -> None:
    idle_s = 0.2
    servers = {
        "uvicorn-h11": on_uvicorn("h11", timeout_keep_alive=idle_s),
        "uvicorn-httptools": on_uvicorn("httptools", timeout_keep_alive=idle_s),
        "aiohttp": on_aiohttp(idle_s),
    }
    chance = random.Random(1)
    with servers[server] as url:
        async with start(*BARE, "--worker-urls", url) as running:

            async def hammer() -> None:
                for number in range(4):
                    body = b"%d" % number
                    reply = await running.client.post("/echo", content=body)
                    assert (reply.status_code, reply.content) == (200, body)
                    await anyio.sleep(idle_s + chance.uniform(-0.005, 0.005))

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(hammer)
            assert [worker.in_flight for worker in running.router.pool] == [0]


class Old(BaseHTTPRequestHandler):
    """Python's own server: HTTP/1.0, bodies that end with the connection, and hints before the answer."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/hints":
            for _ in range(3):
                self.send_response_only(103)
                self.send_header("Link", "</style.css>; rel=preload")
                self.end_headers()
                self.flush_headers()
        self.send_response(200)
        self.send_header("X-Seen", self.headers.get("expect", "no expectation"))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("version", "paths"), [("HTTP/1.0", ["/"]), ("HTTP/1.1", ["/", "/hints"])])
async def test_bodies_that_end_with_the_connection_and_early_hints(
    start: Start, version: str, paths: list[str]
) -> None:
    handler = type("Handler", (Old,), {"protocol_version": version})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            async with start(*BARE, "--worker-urls", url) as running:
                for path in paths:
                    for body in (b"", b"hello", b"x" * (3 << 20)):
                        headers = {"expect": "100-continue", "connection": "close"}
                        reply = await running.client.post(path, content=body, headers=headers)
                        assert (reply.status_code, reply.content) == (200, body)
                        assert "link" not in reply.headers
                        assert reply.headers["x-seen"] == "no expectation"
        finally:
            server.shutdown()


async def test_files_of_nginx(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("files")
    data = random.Random(3).randbytes(4 << 20)
    text = b"some text, some text. " * 5000
    (folder / "data").write_bytes(data)
    (folder / "text.html").write_bytes(text)
    rules = f"""
        listen 127.0.0.1:PORT; root {folder}; gzip on; gzip_types text/html; dav_methods PUT;
        location /until_close/ {{ alias {folder}/; chunked_transfer_encoding off; }}
    """
    with nginx(folder, rules) as url:
        async with start(*BARE, "--worker-urls", url) as running:
            whole = await running.client.get("/data")
            assert whole.content == data
            part = await running.client.get("/data", headers={"range": "bytes=100-199"})
            assert (part.status_code, part.content) == (206, data[100:200])
            same = await running.client.get("/data", headers={"if-none-match": whole.headers["etag"]})
            assert (same.status_code, same.content) == (304, b"")
            head = await running.client.head("/data")
            assert (head.content, head.headers["content-length"]) == (b"", str(len(data)))
            for path in ("/text.html", "/until_close/text.html"):  # chunked; ended with the connection
                zipped = await running.client.get(path, headers={"accept-encoding": "gzip"})
                assert zipped.headers["content-encoding"] == "gzip"
                assert "content-length" not in zipped.headers
                assert zipped.content == text
            put = await running.client.put("/copy", content=data)
            assert put.status_code == 201
            assert (folder / "copy").read_bytes() == data
            missing = await running.client.get("/missing")
            assert missing.status_code == 404
            assert b"nginx" in missing.content


async def test_proxies_of_the_environment_are_ignored(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"from the proxy"))

    async with scripted(never) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with on_uvicorn("httptools") as url:
            async with start(*BARE, "--worker-urls", url) as running:
                assert (await running.client.post("/echo", content=b"x")).content == b"x"
                assert (await running.client.post("/add_worker", params={"url": url})).json().keys() == {
                    "status",
                    "worker_urls",
                }
        assert proxy.accepted == 0
