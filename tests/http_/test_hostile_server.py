"""A worker that says anything at all, byte by byte: each answer is whole, a clean error, or visibly broken."""

from __future__ import annotations

import contextlib
import socket
import threading

import anyio
import httpx
import pytest

from core.servers import Scripted, Wire, answer, content, on_both_loops, scripted, talk
from deadlines import HANG_S
from holding import add_ready
from router_core.errors import WorkerBroke
from router_core.workers import Worker
from routers import BARE, Start
from slime_http.limits import Limits
from slime_http.upstream import Upstream
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nX-Trailer: t\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nhello world"
SHAPES = {
    "length": (answer(b"hello world", b"X-A: 1", b"X-A: 2"), b"hello world"),
    "chunked": (CHUNKED, b"hello world"),
    "until-close": (UNTIL_CLOSE, b"hello world"),
    "hints": (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + CHUNKED, b"hello world"),
    "no-content": (b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", b""),
}


def rest(request_line: bytes) -> list[str]:
    """The parts of the path in a request line."""
    return request_line.split(b" ")[1].decode().strip("/").split("/")


async def ask(running: Running, path: str) -> httpx.Response | None:
    """The answer to a GET, or None when it was visibly broken."""
    try:
        return await running.client.get(path)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return None


def reading(worker: Scripted) -> tuple[str, ...]:
    return (*BARE, "--worker-urls", worker.url)


async def all_of(running: Running, paths: list[str]) -> dict[str, bytes]:
    """The bytes of the answers to GETs of ``paths``, a connection each, at once."""
    found: dict[str, bytes] = {}

    async def get(path: str) -> None:
        request = f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        found[path] = await talk(running.url, request.encode())

    async with anyio.create_task_group() as tasks:
        for path in paths:
            tasks.start_soon(get, path)
    return found


async def test_an_answer_split_at_any_byte_is_the_same_answer(start: Start) -> None:
    async def split(wire: Wire) -> None:
        while (request := await wire.request()) is not None:
            shape, place = rest(request.line)
            whole = SHAPES[shape][0]
            await wire.send(whole[: int(place)])
            await anyio.sleep(
                0.05
            )  # so that the first part is read alone; too little would weaken, never break
            await wire.send(whole[int(place) :])
            if shape == "until-close":
                return

    async with scripted(split) as worker, start(*reading(worker)) as running:
        for shape, (whole, body) in SHAPES.items():
            found = await all_of(running, [f"{shape}/{place}" for place in range(len(whole) + 1)])
            expected = found[f"{shape}/0"]
            assert content(expected) == body
            for path, reply in found.items():
                # how the router cuts a chunked body is its own affair, so heads and bodies are compared
                assert reply.partition(b"\r\n\r\n")[0] == expected.partition(b"\r\n\r\n")[0], path
                assert content(reply) == body, path


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_torn_answer_is_never_passed_as_whole(start: Start, how: str) -> None:
    async def torn(wire: Wire) -> None:
        if (request := await wire.request()) is not None:
            shape, place = rest(request.line)
            await wire.send(SHAPES[shape][0][: int(place)])
            if how == "reset":
                await anyio.sleep(0.05)  # a reset may overtake what was sent before it
                wire.reset()

    async with scripted(torn) as worker, start(*reading(worker)) as running:
        for shape, (whole, body) in SHAPES.items():
            head = len(whole) - len(whole[whole.index(b"HTTP/1.1 20") :].partition(b"\r\n\r\n")[2])
            found = await all_of(running, [f"{shape}/{place}" for place in range(len(whole))])
            for place, reply in enumerate(found[f"{shape}/{place}"] for place in range(len(whole))):
                if place < head:
                    assert reply.startswith(b"HTTP/1.1 502 "), (shape, place)
                    assert b'"code":"WORKER_BROKE"' in content(reply), (shape, place)
                elif shape == "until-close" and how == "closed":
                    assert content(reply) == body[: place - head], (
                        place
                    )  # what ends with the connection ends here
                else:
                    assert reply.startswith(b"HTTP/1.1 200 "), (shape, place)
                    with pytest.raises(ValueError, match="without sending complete message body"):
                        content(reply)
        assert running.router.proxy.open_connections == 0
        assert [worker.in_flight for worker in running.router.pool] == [0]


OK = b"HTTP/1.1 200 OK\r\n"
CODED = OK + b"Transfer-Encoding: chunked\r\n"
REFUSED = {
    "both lengths": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, turned": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "a signed length": OK + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": OK + b"Content-Length: -5\r\n\r\nhello",
    "a hexadecimal length": OK + b"Content-Length: 0x5\r\n\r\nhello",
    "an empty length": OK + b"Content-Length:\r\n\r\nhello",
    "an endless length": OK + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "a space before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "an empty name": OK + b": 5\r\n\r\nhello",
    "no colon": OK + b"Content-Length 5\r\n\r\nhello",
    "bare LF": OK + b"Content-Length: 5\nX: y\n\nhello",
    "bare CR": OK + b"X: a\rContent-Length: 5\r\n\r\nhello",
    "a folded line": OK + b"X: a\r\n Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello",
    "NUL in a value": OK + b"X: a\0b\r\nContent-Length: 5\r\n\r\nhello",
    "a control character in a value": OK + b"X: a\x01b\r\nContent-Length: 5\r\n\r\nhello",
    "gzip as transfer coding": OK + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "identity": OK + b"Transfer-Encoding: identity\r\n\r\nhello",
    "chunked twice": CODED + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a vertical tab before chunked": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 050": b"HTTP/1.1 050 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 99": b"HTTP/1.1 99 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 600": b"HTTP/1.1 600 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 999": b"HTTP/1.1 999 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 2000": b"HTTP/1.1 2000 ?\r\nContent-Length: 5\r\n\r\nhello",
    "status 101": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nhello",
    "status 101 without upgrade": b"HTTP/1.1 101 Switching Protocols\r\nContent-Length: 5\r\n\r\nhello",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/0.9": b"hello, world",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x16",
}


async def test_ambiguous_answer_is_refused(start: Start) -> None:
    cases = list(REFUSED.values())

    async def hostile(wire: Wire) -> None:
        request = await wire.request()
        if request is not None:
            await wire.send(cases[int(rest(request.line)[0])])
            await wire.until_closed()

    async with scripted(hostile) as worker, start(*reading(worker)) as running:
        for number, what in enumerate(REFUSED):
            with anyio.fail_after(HANG_S):
                reply = await running.client.get(f"/{number}")
            assert reply.status_code == 502, what
            assert reply.json()["error"]["code"] == "WORKER_BROKE", what
            assert worker.url in reply.json()["error"]["message"]
            assert running.router.proxy.open_connections == 0, what
        assert len(worker.arrived) == len(REFUSED)  # what has answered is not asked again


BREAKS_OFF = {
    "a hexadecimal prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
    "an endless size": b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "a space behind the size": b"5 \r\nhello\r\n0\r\n\r\n",
    "bare LF": b"5\nhello\n0\n\n",
    "bare LF behind an extension": b"5;a=b\nhello\r\n0\r\n\r\n",
    "more data than its size": b"5\r\nhello!\r\n0\r\n\r\n",
    "less data than its size": b"9\r\nhello\r\n0\r\n\r\n",
    "a length among the trailers": b"5\r\nhello\r\n0\r\nContent-Length: 7\r\n\r\n",
    "a folded trailer": b"5\r\nhello\r\n0\r\nX: a\r\n b\r\n\r\n",
}


async def test_a_bad_chunk_breaks_the_clients_body_too(start: Start) -> None:
    cases = list(BREAKS_OFF.values())

    async def hostile(wire: Wire) -> None:
        request = await wire.request()
        if request is not None:
            await wire.send(CODED + b"\r\n" + cases[int(rest(request.line)[0])])
            await wire.end()
            await wire.until_closed()

    async with scripted(hostile) as worker, start(*reading(worker)) as running:
        for number, what in enumerate(BREAKS_OFF):
            with anyio.fail_after(HANG_S):
                reply = await talk(running.url, b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number)
            assert reply.startswith(b"HTTP/1.1 200"), what
            with pytest.raises(ValueError, match="without sending complete message body"):
                content(reply)
            assert running.router.proxy.open_connections == 0, what


LINE = b"x" * 1000
ENDLESS = {
    "status line": (b"HTTP/1.1 200 ", LINE),
    "empty lines": (b"", b"\r\n" * 500),
    "headers": (OK, b"X-A: %s\r\n" % LINE),
    "small headers": (OK, b"A:\r\n" * 250),
    "header name": (OK, LINE),
    "header value": (OK + b"X-A: ", LINE),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
    "1xx with headers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 25),
}
ENDLESS_BODY = {
    "chunk extension": (CODED + b"\r\n5;", LINE),
    "chunk size": (CODED + b"\r\n", b"0" * 1000),
    "trailers": (CODED + b"\r\n5\r\nhello\r\n0\r\n", b"X-A: %s\r\n" % LINE),
    "trailer value": (CODED + b"\r\n5\r\nhello\r\n0\r\nX-A: ", LINE),
}


async def test_endless_input_is_cut_after_64_kib(start: Start) -> None:
    cases = ENDLESS | ENDLESS_BODY
    sent: dict[str, int] = {}

    async def endless(wire: Wire) -> None:
        request = await wire.request()
        if request is not None:
            what = list(cases)[int(rest(request.line)[0])]
            first, more = cases[what]
            await wire.send(first)
            sent[what] = 0
            while await wire.send(more):
                sent[what] += len(more)

    async with scripted(endless) as worker, start(*reading(worker)) as running:
        for number, what in enumerate(cases):
            with anyio.fail_after(HANG_S):
                reply = await ask(running, f"/{number}")
            if what in ENDLESS:
                assert reply is not None, what
                assert reply.status_code == 502, what
                assert "65536 bytes" in reply.json()["error"]["message"], what
            else:
                assert reply is None, what  # the body had begun
            assert running.router.proxy.open_connections == 0, what
    assert sent.keys() == cases.keys()
    assert max(sent.values()) < 8 << 20  # the kernel's buffers; the router itself took 64 KiB


async def test_a_head_of_60_kib_and_a_trailer_pass(start: Start) -> None:
    fields = [b"X-%d: %s" % (number, b"v" * 992) for number in range(60)]

    async def large(wire: Wire) -> None:
        while await wire.request():
            await wire.send(
                b"\r\n".join([CODED[:-2], *fields]) + b"\r\n\r\n5\r\nhello\r\n0\r\nX-T: t\r\n\r\n"
            )

    async with scripted(large) as worker, start(*reading(worker)) as running:
        for _ in range(3):  # the limit is per answer, also on a connection that is used again
            reply = await running.client.get("/")
            assert reply.content == b"hello"
            assert reply.headers["x-59"] == "v" * 992
            assert "x-t" not in reply.headers
        assert worker.accepted == 1


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_a_second_answer_never_becomes_the_next_requests_answer(start: Start, pause: float) -> None:
    async def chatty(wire: Wire) -> None:
        while request := await wire.request():
            await wire.send(answer(request.body))
            await anyio.sleep(pause)
            await wire.send(answer(b"poison"))

    async with scripted(chatty) as worker, start(*reading(worker)) as running:
        for number in range(4):
            reply = await running.client.post("/", content=b"%d" % number)
            assert reply.content == b"%d" % number
            if pause:
                await anyio.sleep(2 * pause)
        assert worker.accepted == 4 or not pause


async def test_second_answer_in_the_packet_closes_connection_but_keeps_answer(start: Start) -> None:
    async def chatty(wire: Wire) -> None:
        while request := await wire.request():
            await wire.send(answer(request.body) + answer(b"poison"))

    async with scripted(chatty) as worker, start(*reading(worker)) as running:
        for number in range(5):
            assert (await running.client.post("/", content=b"%d" % number)).content == b"%d" % number
        assert worker.accepted == 5


@pytest.mark.parametrize("extra", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"\r\n", b"\x00"])
async def test_bytes_on_an_idle_connection_close_it(start: Start, extra: bytes) -> None:
    async def restless(wire: Wire) -> None:
        while request := await wire.request():
            await wire.send(answer(request.body))
            await anyio.sleep(0.02)
            await wire.send(extra)
            await wire.until_closed()
            return

    async with scripted(restless) as worker, start(*reading(worker)) as running:
        assert (await running.client.post("/", content=b"1")).content == b"1"
        with anyio.fail_after(HANG_S):
            while running.router.proxy.open_connections:  # noqa: ASYNC110  # seen from outside only
                await anyio.sleep(0.005)
        assert (await running.client.post("/", content=b"2")).content == b"2"


async def test_bytes_that_the_event_loop_has_not_seen_yet_are_no_answer_either() -> None:
    poison, poisoned = threading.Event(), threading.Event()

    def serve(listening: socket.socket) -> None:
        first, _ = listening.accept()
        with first:
            first.recv(1 << 16)
            first.sendall(answer(b"1"))
            poison.wait()
            first.sendall(answer(b"poison"))
            poisoned.set()
            second, _ = listening.accept()
            with second:
                second.recv(1 << 16)
                second.sendall(answer(b"2"))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        upstream = Upstream(f"http://127.0.0.1:{listening.getsockname()[1]}", Limits())
        with contextlib.closing(upstream):
            assert await (await upstream.request("GET", b"/", [])).read() == b"1"
            poison.set()
            poisoned.wait()  # the event loop is busy with something long
            assert await (await upstream.request("GET", b"/", [])).read() == b"2"


async def test_headers_that_a_worker_names_as_its_hops_end_here(start: Start) -> None:
    async def hopping(wire: Wire) -> None:
        while request := await wire.request():
            hint = b"HTTP/1.1 103 Early Hints\r\nConnection: X-Stays\r\n\r\n"
            fields = (b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"X-Stays: 1", b"Keep-Alive: timeout=5")
            upgrade = (b"Connection: Upgrade", b"Upgrade: h2c") if b"/upgrade" in request.line else ()
            await wire.send(hint + answer(b"hello", *fields, *upgrade))

    async with scripted(hopping) as worker, start(*reading(worker)) as running:
        for path in ("/", "/upgrade", "/"):
            reply = await running.client.get(path)
            assert reply.content == b"hello"
            assert reply.headers["x-stays"] == "1"
            assert not {"connection", "keep-alive", "upgrade", "x-hop"} & reply.headers.keys()
        assert worker.accepted == 1


async def test_a_worker_that_does_not_accept_connections_is_a_504(start: Start) -> None:
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(4):  # more than the queue holds: the next connection is not answered at all
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        async with start(*BARE, "--connect-timeout-secs", "0.2") as running:
            add_ready(running.router.pool, Worker(f"http://127.0.0.1:{address[1]}"))
            with anyio.fail_after(HANG_S):
                reply = await running.client.get("/")
            assert reply.status_code == 504
            assert "did not accept a connection within 0.2 s" in reply.json()["error"]["message"]
            assert running.router.proxy.open_connections == 0


async def test_a_worker_whose_name_means_nothing_is_a_502(start: Start) -> None:
    async with start(*BARE) as running:
        add_ready(running.router.pool, Worker("http://a..b:1"))
        reply = await running.client.get("/")
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "WORKER_UNREACHABLE")


async def test_a_body_behind_head_204_and_304_is_dropped_with_the_connection(start: Start) -> None:
    async def wrong(wire: Wire) -> None:
        while request := await wire.request():
            method, path, _ = request.line.split(b" ")
            status = b"200 OK" if method == b"HEAD" else path[1:4] + b" Nothing"
            await wire.send(answer(b"hello", status=status))

    async with scripted(wrong) as worker, start(*reading(worker)) as running:
        for method, path, status in [("HEAD", "/", 200), ("GET", "/204", 204), ("GET", "/304", 304)] * 2:
            reply = await running.client.request(method, path)
            assert (reply.status_code, reply.content) == (status, b"")
        assert (await running.client.get("/200")).content == b"hello"
        assert worker.accepted == 7


@pytest.mark.parametrize("size", [1, 40 << 20])
async def test_an_answer_before_the_request_was_read_reaches_the_client(start: Start, size: int) -> None:
    async def hasty(wire: Wire) -> None:
        while head := await wire.head():
            await wire.send(answer(b"too much", b"Connection: close", status=b"413 Content Too Large"))
            await wire.end()
            await wire.until_closed()
            assert head.values(b"content-length") == [b"%d" % size]

    async with scripted(hasty) as worker, start(*reading(worker)) as running:
        for _ in range(3):
            reply = await running.client.post("/", content=b"x" * size)
            assert (reply.status_code, reply.content) == (413, b"too much")
        assert running.router.proxy.open_connections == 0


async def test_a_worker_that_closes_in_the_middle_of_an_upload_is_a_clean_502(start: Start) -> None:
    async def deaf(wire: Wire) -> None:
        await wire.head()

    async with scripted(deaf) as worker, start(*reading(worker)) as running:
        reply = await running.client.post("/", content=b"x" * (40 << 20))
        assert reply.status_code == 502
        assert running.router.proxy.open_connections == 0
        assert [worker.in_flight for worker in running.router.pool] == [0]


async def test_worker_that_closes_each_reused_connection_fails_no_request(
    start: Start,
) -> None:
    async def one_each(wire: Wire) -> None:
        if request := await wire.request():
            await wire.send(answer(request.body))
            await wire.head()  # the next one's head is read, and nobody answers

    async with scripted(one_each) as worker, start(*reading(worker)) as running:
        for number in range(6):
            reply = await running.client.post("/", content=b"%d" % number)
            assert (reply.status_code, reply.content) == (200, b"%d" % number)
        assert worker.accepted == 6


async def test_reused_connection_that_dies_during_work_is_not_retried(
    start: Start,
) -> None:
    async def dying(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"whole"))
        if await wire.request():
            await anyio.sleep(0.7)

    async with scripted(dying) as worker, start(*reading(worker)) as running:
        assert (await running.client.post("/", content=b"1")).content == b"whole"
        assert (await running.client.post("/", content=b"2")).status_code == 502
        assert [request.body for request in worker.arrived] == [b"1", b"2"]


async def test_request_to_a_worker_that_dies_with_its_listener_counts_as_sent() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def dying() -> None:
        wire, _ = listener.accept()
        with wire, listener:
            wire.recv(65536)
            wire.sendall(answer(b"whole"))
            wire.recv(65536)

    upstream = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", Limits())
    worker = threading.Thread(target=dying)
    worker.start()
    try:
        assert await (await upstream.request("POST", b"/", [], b"1")).read() == b"whole"
        with pytest.raises(WorkerBroke):
            await upstream.request("POST", b"/", [], b"2")
    finally:
        upstream.close()
        worker.join()


async def test_a_fresh_connection_that_closes_unanswered_is_not_tried_again(start: Start) -> None:
    async def closing(wire: Wire) -> None:
        await wire.request()

    async with scripted(closing) as worker, start(*reading(worker)) as running:
        reply = await running.client.post("/", content=b"once")
        assert reply.status_code == 502
        assert "before answering" in reply.json()["error"]["message"]
        assert [request.body for request in worker.arrived] == [b"once"]


async def test_a_reused_connection_that_dies_within_an_answer_is_not_tried_again(start: Start) -> None:
    async def half(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"whole"))
        if await wire.request():
            await wire.send(b"HTTP")

    async with scripted(half) as worker, start(*reading(worker)) as running:
        assert (await running.client.post("/", content=b"1")).content == b"whole"
        assert (await running.client.post("/", content=b"2")).status_code == 502
        assert [request.body for request in worker.arrived] == [b"1", b"2"]


SILENCES = {
    "nothing": b"",
    "half": b"HTTP/1.1 200 OK\r\nX-A:",
    "hint": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
}


async def test_a_worker_that_never_answers_is_a_504(start: Start) -> None:
    async def silent(wire: Wire) -> None:
        request = await wire.request()
        if request is not None:
            await wire.send(SILENCES[rest(request.line)[0]])
            await wire.until_closed()

    async with (
        scripted(silent) as worker,
        start(
            *reading(worker), "--request-timeout-secs", "0.3", "--stream-silence-timeout-secs", "60"
        ) as running,
    ):
        with anyio.fail_after(HANG_S):
            found = await all_of(running, list(SILENCES))
        for said, reply in found.items():
            assert reply.startswith(b"HTTP/1.1 504 "), said
            assert b'"code":"WORKER_TIMEOUT"' in content(reply), said
            assert b"did not answer within 0.3 s" in content(reply), said
        assert running.router.proxy.open_connections == 0


async def test_a_worker_that_drips_its_head_is_a_504(start: Start) -> None:
    async def dripping(wire: Wire) -> None:
        await wire.request()
        while await wire.send(b"HTTP/1.1 103 Early Hints\r\n\r\n"):  # noqa: ASYNC110  # no event: a rhythm
            await anyio.sleep(0.02)

    async with (
        scripted(dripping) as worker,
        start(*reading(worker), "--request-timeout-secs", "0.3") as running,
    ):
        with anyio.fail_after(HANG_S):
            assert (await running.client.get("/")).status_code == 504


async def test_a_worker_that_falls_silent_within_an_answer_breaks_the_body(start: Start) -> None:
    async def fading(wire: Wire) -> None:
        await wire.request()
        await wire.send(CODED + b"\r\n")
        for _ in range(4):  # longer than the limit in all, never longer at once
            await wire.send(b"5\r\nhello\r\n")
            await anyio.sleep(0.15)
        await wire.until_closed()

    async with (
        scripted(fading) as worker,
        start(*reading(worker), "--stream-silence-timeout-secs", "0.3") as running,
    ):
        with anyio.fail_after(HANG_S):
            reply = await talk(running.url, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.count(b"hello") == 4
        with pytest.raises(ValueError, match="incomplete"):
            content(reply)
        assert running.router.proxy.open_connections == 0
