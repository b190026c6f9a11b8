"""No client adds series without end, whatever it sends."""

from __future__ import annotations

import random
import string
from contextlib import suppress

import anyio
import httpx
import pytest
from starlette.routing import compile_path

from metrics.scrapes import scraped
from router_core.types import Message, Receive, Scope, Send
from routers import Start
from slime_http.serving import serving
from slime_metrics.counts import Counts
from slime_metrics.labels import Labels
from slime_metrics.requests import Measured
from slime_metrics.settings import DURATION_BUCKETS

pytestmark = pytest.mark.anyio

_BURST = 50
_ANSWER = b"HTTP/1.1 "


async def moody(scope: Scope, receive: Receive, send: Send) -> None:
    """A worker that answers with the status that a header asks for, and an error with a code of its own."""
    if scope["type"] == "lifespan":
        while True:
            message: Message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    status = int(dict(scope["headers"]).get(b"x-status", b"200"))
    body = b'{"error":{"code":"%b"}}' % scope["raw_path"][:20]
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


def raw(number: int, chance: random.Random) -> bytes:
    """A request with a random method, path, model, session, key and wanted status."""
    word = "".join(chance.choices(string.ascii_lowercase, k=8))
    method = chance.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "PROPFIND", "MKCOL", "SEARCH"))
    places = (
        f"/{word}",
        f"/v1/{word}",
        f"/workers/{word}",
        f"/generate/{word}",
        f"/sessions/{word}/generate",
        "/generate",
    )
    body = f'{{"model":"{word}","session_id":"{word}{number}"}}'.encode()
    status = chance.choice((200, 201, 299, 404, 418, 444, 499, 500, 599))
    head = (
        f"{method} {chance.choice(places)} HTTP/1.1", "host: 127.0.0.1", f"x-status: {status}",
        f"x-session-id: {word}{number}", f"user-agent: {word}", "content-type: application/json",
        f"content-length: {len(body)}", "", "",
    )  # fmt: skip
    return "\r\n".join(head).encode() + body


async def send_all(url: str, count: int, seed: int) -> None:
    """Send random requests in bursts, on a new connection where the router closes one."""
    chance = random.Random(seed)
    requests = [raw(number, chance) for number in range(count)]
    address = httpx.URL(url)
    while requests:
        async with await anyio.connect_tcp(address.host, address.port or 80) as stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while requests:
                    burst, received, answered = requests[:_BURST], b"", 0
                    await stream.send(b"".join(burst))
                    while answered < len(burst):
                        received += await stream.receive(1 << 20)
                        more = received.count(_ANSWER)
                        received = (
                            received[-len(_ANSWER) + 1 :] if more == 0 else received.rpartition(_ANSWER)[2]
                        )
                        answered += more
                        del requests[:more]


async def test_random_requests_add_no_series(start: Start) -> None:
    async with serving(moody) as worker, start("--disable-retries", "--worker-urls", worker) as running:
        await send_all(running.url, 1000, seed=1)
        before = await scraped(running.client)
        await send_all(running.url, 1000, seed=2)
        after = await scraped(running.client)
    total = sum(value for (name, _), value in after.items() if name == "smg_http_requests_total")
    assert total >= 2000
    assert len(after) <= len(before) + 50  # a rare combination of the closed sets may come late
    paths = {labels.partition("path=")[2] for name, labels in after if name == "smg_http_requests_total"}
    assert paths == {"other", "/generate", "/workers/{worker_id}", "/metrics"}
    methods = {labels.split()[0] for name, labels in after if name == "smg_http_requests_total"}
    assert methods == {f"method={name}" for name in ("GET", "POST", "PUT", "PATCH", "DELETE", "OTHER")}
    statuses = {labels.rpartition("=")[2] for name, labels in after if name == "smg_http_responses_total"}
    assert {"201", "404", "418"} <= statuses
    assert not statuses & {"299", "444", "599"}
    codes = {labels.split()[0] for name, labels in after if name == "smg_http_responses_total"}
    assert len(codes) < 10


async def test_ten_thousand_requests_add_no_series() -> None:
    """With other paths, methods, statuses and workers each time, without the sockets."""
    chance = random.Random(7)
    counts = Counts(DURATION_BUCKETS, anyio.current_time)
    counts.know(Labels([compile_path("/workers/{worker_id}")[0]]))
    counts.worker_added("http://w")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = chance.randrange(100, 1000)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send(
            {"type": "http.response.body", "body": b'{"error":{"code":"%d"}}' % chance.randrange(10**9)}
        )

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(_: Message) -> None:
        pass

    measured = Measured(app, counts).serve
    sizes = []
    for _ in range(2):
        for _ in range(5000):
            word = "".join(chance.choices(string.ascii_lowercase, k=8))
            path = chance.choice((f"/{word}", f"/workers/{word}", "/generate"))
            method = chance.choice(("GET", "POST", word.upper()))
            await measured({"type": "http", "method": method, "path": path}, receive, send)
            counts.failure(f"http://{word}", word)
        sizes.append((len(counts.series), len(counts.errors), len(counts.failed)))
    assert sum(series.whole.count for series in counts.series.values()) == 10_000
    # 3 methods, 3 paths, and the 62 statuses that HTTP knows with one for each class
    assert sizes[1][0] <= 3 * 3 * 70
    assert sizes[1][1] <= 70
    assert sizes[1][2] == 1
