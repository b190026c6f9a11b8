"""Ambiguous framing: no byte of it reaches a worker as a request that the router did not see.

Each case ends in a request to ``/hidden``, which a server that counts otherwise would find in a body, or in a header.
More of what is refused outright is in tests/core/test_request_bodies.py, and of answers in test_hostile_server.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import anyio
import anyio.lowlevel
import pytest

from core.servers import Arrived, Scripted, Wire, answer, content, dial, on_both_loops, scripted, talk
from routers import BARE, Start
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


def posted(*fields: bytes, body: bytes = b"hello") -> bytes:
    return b"\r\n".join((b"POST /seen HTTP/1.1", b"Host: localhost", *fields, b"", body))


def coded(chunks: bytes) -> bytes:
    return posted(b"Transfer-Encoding: chunked", body=chunks)


CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
LENGTH = b"Content-Length: 5"
CHUNKED = b"Transfer-Encoding: chunked"
UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: x", b"Upgrade: h2c")

#: Refused, and the connection closed: nobody can say where the next request begins.
REFUSED = {
    "chunked, then a length": posted(CHUNKED, LENGTH, body=b"0\r\n\r\n"),
    "chunked twice": posted(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked, then identity": posted(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
    "chunked, then a comma": posted(b"Transfer-Encoding: chunked,", body=CHUNKS),
    "chunked, then another line": posted(CHUNKED, b"Transfer-Encoding: x", body=CHUNKS),
    "chunked with a parameter": posted(b"Transfer-Encoding: chunked;q=1", body=CHUNKS),
    "chunked in quotes": posted(b'Transfer-Encoding: "chunked"', body=CHUNKS),
    "chunked behind a vertical tab": posted(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "chunked between tabs": posted(b"Transfer-Encoding:\tchunked\t", body=CHUNKS),
    "almost chunked": posted(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "identity": posted(b"Transfer-Encoding: identity"),
    "identity and a length": posted(b"Transfer-Encoding: identity", LENGTH),
    "an empty coding and a length": posted(b"Transfer-Encoding: ", LENGTH),
    "gzip": posted(b"Transfer-Encoding: gzip"),
    "a coding in a folded line": posted(b"Transfer-Encoding:\r\n chunked", body=CHUNKS),
    "a length in a folded line": posted(b"Content-Length: 5\r\n 0"),
    "a coding folded into another header": posted(b"X: a\r\n\tTransfer-Encoding: chunked", LENGTH),
    "a space before the name": posted(b" Transfer-Encoding: chunked", LENGTH),
    "a space behind the name": posted(b"Transfer-Encoding : chunked", LENGTH),
    "a tab behind the name": posted(b"Transfer-Encoding\t: chunked", LENGTH),
    "the same length twice": posted(LENGTH, LENGTH),
    "a list of lengths": posted(b"Content-Length: 5, 5"),
    "a negative length": posted(b"Content-Length: -5"),
    "a hexadecimal length": posted(b"Content-Length: 0x5"),
    "a fractional length": posted(b"Content-Length: 5.0"),
    "two numbers as a length": posted(b"Content-Length: 5 0"),
    "an empty length": posted(b"Content-Length: "),
    "a length that overflows to 5": posted(b"Content-Length: 18446744073709551621"),
    "a length with an underscore": posted(b"Content-Length: 0_5"),
    "a length in other digits": posted("Content-Length: ٥".encode()),
    "a length behind a vertical tab": posted(b"Content-Length: \x0b5"),
    "a length and NUL": posted(b"Content-Length: 5\0"),
    "NUL in a value": posted(b"X: a\0b", LENGTH),
    "CR in a value": posted(b"X: a\rContent-Length: 0", LENGTH),
    "LF in a value": posted(b"X: a\nContent-Length: 0", LENGTH),
    "LF as the end of the head": b"POST /seen HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\n\nhello",
    "CR LF LF as the end of the head": b"GET /seen HTTP/1.1\r\nHost: localhost\r\n\n",
    "a control character in a value": posted(b"X: \x01", LENGTH),
    "no name": posted(b": a", LENGTH),
    "no colon": posted(b"Xa", LENGTH),
    "NUL in a name": posted(b"X\0: a", LENGTH),
    "a name that is no token": posted(b"X(y): a", LENGTH),
    "a name beyond ASCII": posted(b"X\xe9: a", LENGTH),
    "a chunk's size with a sign": coded(b"+5\r\nhello\r\n0\r\n\r\n"),
    "a chunk's size below zero": coded(b"-5\r\nhello\r\n0\r\n\r\n"),
    "a chunk's size that overflows to 5": coded(b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    "a space before a chunk's size": coded(b" 5\r\nhello\r\n0\r\n\r\n"),
    "a space behind a chunk's size": coded(b"5 \r\nhello\r\n0\r\n\r\n"),
    "no chunk's size": coded(b"\r\nhello\r\n0\r\n\r\n"),
    "LF behind a chunk's size": coded(b"5\nhello\r\n0\r\n\r\n"),
    "LF behind a chunk's extension": coded(b"5;a\nhello\r\n0\r\n\r\n"),
    "CR in a chunk's extension": coded(b"5;a\rb\r\nhello\r\n0\r\n\r\n"),
    "CR LF in a quoted extension": coded(b'5;a="\r\nhello"\r\n0\r\n\r\n'),
    "no line end behind a chunk": coded(b"5\r\nhello0\r\n\r\n"),
    "two letters for the line end": coded(b"5\r\nhelloXX0\r\n\r\n"),
    "more than the chunk's size": coded(b"5\r\nhello, world\r\n0\r\n\r\n"),
    "a length among the trailers": coded(b"5\r\nhello\r\n0\r\nContent-Length: 7\r\n\r\n"),
    "a coding among the trailers": coded(b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "a body and an upgrade": posted(*UPGRADE, b"Content-Length: %d" % len(HIDDEN), body=b""),
    "chunks and an upgrade": posted(*UPGRADE, CHUNKED, body=CHUNKS),
    "a websocket with a body": posted(b"Connection: upgrade", b"Upgrade: websocket", LENGTH),
    "a tab in the request line": b"GET\t/seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two targets": b"GET /seen /seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a space behind the version": b"GET /seen HTTP/1.1 \r\nHost: localhost\r\n\r\n",
    "a version in lower case": b"GET /seen http/1.1\r\nHost: localhost\r\n\r\n",
    "a version that is none": b"GET /seen HTTP/1.2\r\nHost: localhost\r\n\r\n",
    "a method in lower case": b"get /seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a method of nobody": b"SMUGGLE /seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CR in the target": b"GET /seen\rX HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target beyond ASCII": b"GET /seen\xe9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target without a slash": b"GET seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target without a path": b"GET http://elsewhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tunnel to a path": b"CONNECT /seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
}

#: Refused, and all that follows is in step: the router reads the message to its end, and passes nothing on.
NOT_PASSED = {
    "identity, then chunked": posted(b"Transfer-Encoding: identity, chunked", body=CHUNKS),
    "gzip, then chunked": posted(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
    "nothing, then chunked": posted(b"Transfer-Encoding: ,chunked", body=CHUNKS),
    "another line, then chunked": posted(b"Transfer-Encoding: x", CHUNKED, body=CHUNKS),
    "a coding of this hop": posted(b"Connection: transfer-encoding", b"Transfer-Encoding: x", CHUNKED, body=CHUNKS),
    "TRACE": b"TRACE /seen HTTP/1.1\r\nHost: localhost\r\n\r\n",
}  # fmt: skip

#: Understood, and written anew for the worker: one length, one Host, nothing of this hop.
PASSED = {
    "a length with a zero": (posted(b"Content-Length: 05"), b"hello"),
    "chunked in odd case": (posted(b"Transfer-Encoding: ChUnKeD", body=CHUNKS), b"hello"),
    "chunks with extensions": (coded(b'5;a="b";c\r\nhello\r\n0;d=e\r\n\r\n'), b"hello"),
    "a chunk's size with zeros": (coded(b"0000000000000000005\r\nhello\r\n0\r\n\r\n"), b"hello"),
    "a chunk's size in both cases": (coded(b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n"), b"0123456789" * 2),
    "trailers": (coded(b"5\r\nhello\r\n0\r\nHost: localhost\r\nAuthorization: x\r\n\r\n"), b"hello"),
    "a request as a body": (posted(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN), HIDDEN),
    "a request as a chunk": (coded(b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)), HIDDEN),
    "a body behind GET": (posted(LENGTH).replace(b"POST", b"GET"), b"hello"),
    "framing with underscores": (posted(LENGTH, b"Content_Length: 50", b"Transfer_Encoding: chunked"), b"hello"),
    "a length named as this hop's": (posted(b"Connection: content-length", LENGTH), b"hello"),
    "a Host named as this hop's": (posted(b"Connection: host, keep-alive", LENGTH), b"hello"),
    "two Hosts": (posted(b"Host: localhost", LENGTH), b"hello"),
    "an absolute target": (posted(LENGTH).replace(b"/seen", b"http://u:p@elsewhere:1/seen"), b"hello"),
    "an expectation of nobody": (posted(b"Expect: 200-ok", LENGTH), b"hello"),
    "empty lines before it": (b"\r\n\r\n" + posted(LENGTH), b"hello"),
    "two spaces": (posted(LENGTH).replace(b"POST ", b"POST  "), b"hello"),
}  # fmt: skip


async def asked(url: str, raw: bytes, piece: int) -> list[int]:
    """The statuses of all answers to ``raw``, sent in pieces of this size, until the connection is closed."""
    loop = asyncio.get_running_loop()
    received = b""
    with await dial(url) as sock, anyio.fail_after(5):
        try:
            for start in range(0, len(raw), piece):
                await loop.sock_sendall(sock, raw[start : start + piece])
                await anyio.lowlevel.checkpoint()
            while some := await loop.sock_recv(sock, 1 << 16):
                received += some
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was closed on what we still had to say
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def lines(arrived: Iterable[Arrived]) -> list[bytes]:
    return [request.line.split(b" ")[1] for request in arrived]


def written_by_the_router(request: Arrived, worker: Scripted) -> bool:
    """Return True when the framing of ``request`` is the router's own."""
    hop = {b"connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect", b"keep-alive"}
    names = {name for name, _ in request.headers}
    return (
        request.values(b"host") == [worker.url.removeprefix("http://").encode()]
        and request.values(b"content-length") in ([], [b"%d" % len(request.body)])
        and not names & (hop | {b"content_length", b"transfer_encoding"})
    )


@pytest.mark.parametrize("piece", [1 << 16, 1], ids=["at once", "byte by byte"])
async def test_ambiguous_framing_closes_the_connection(start: Start, piece: int) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for what, raw in REFUSED.items():
            statuses = await asked(running.url, raw + HIDDEN, piece)
            assert statuses in ([400], []), what  # a reset may overtake the answer
            assert statuses or piece == 1, what
        assert worker.arrived == []
        await unharmed(running)


@pytest.mark.parametrize("piece", [1 << 16, 1], ids=["at once", "byte by byte"])
async def test_refused_request_leaves_the_rest_in_step(start: Start, piece: int) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for what, raw in NOT_PASSED.items():
            assert await asked(running.url, raw + LAST, piece) == [400, 200], what
        assert lines(worker.arrived) == [b"/last"] * len(NOT_PASSED)
        await unharmed(running)


@pytest.mark.parametrize("piece", [1 << 16, 1], ids=["at once", "byte by byte"])
async def test_forwarded_request_is_framed_anew(start: Start, piece: int) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for what, (raw, body) in PASSED.items():
            worker.arrived.clear()
            assert await asked(running.url, raw + LAST, piece) == [200, 200], what
            assert lines(worker.arrived) == [b"/seen", b"/last"], what
            assert worker.arrived[0].body == body, what
            assert all(written_by_the_router(request, worker) for request in worker.arrived), what


async def unharmed(running: Running) -> None:
    assert (await running.client.post("/next", content=b"next")).content == b"next"
    assert [worker.in_flight for worker in running.router.pool] == [0]


async def test_a_chunk_without_end_is_held_to_the_limit_of_bodies(start: Start) -> None:
    flags = (*BARE, "--max-payload-size", "100000")
    async with scripted(echo) as worker, start(*flags, "--worker-urls", worker.url) as running:
        raw = coded(b"ffffffffffffffff\r\n" + bytes(200_000))
        assert await asked(running.url, raw, 1 << 16) in ([413], [])
        assert worker.arrived == []
        await unharmed(running)


async def test_requests_sent_ahead_are_answered_in_order_each_once(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        ahead = b"".join(
            b"POST /%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n%02d" % (number, number)
            for number in range(40)
        )
        for piece in (1 << 16, 7):
            worker.arrived.clear()
            assert await asked(running.url, ahead + LAST + HIDDEN, piece) == [200] * 41
            assert lines(worker.arrived) == [*(b"/%d" % number for number in range(40)), b"/last"]
            assert [request.body for request in worker.arrived] == [*(b"%02d" % i for i in range(40)), b""]


async def test_behind_an_upgrade_nothing_is_read(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        raw = b"\r\n".join((b"GET /seen HTTP/1.1", b"Host: localhost", *UPGRADE, b"", b""))
        assert await asked(running.url, raw + HIDDEN, 1 << 16) == [200]
        assert await asked(running.url, raw + HIDDEN, 1) in ([200], [])  # a reset may overtake the answer
        assert lines(worker.arrived) == [b"/seen"] * 2
        assert all(written_by_the_router(request, worker) for request in worker.arrived)


async def test_headers_that_a_client_names_as_its_hops_end_here(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        raw = (
            b"GET /seen HTTP/1.1\r\nHost: localhost\r\nX-A: 1\r\nX-B: 2\r\nx-b: 3\r\nX-C: 4\r\n"
            b"Connection: X-A , close\r\nConnection: x-b\r\nTE: trailers\r\nKeep-Alive: 5\r\n"
            b"Proxy-Authorization: Basic eA==\r\nProxy-Connection: x\r\n\r\n"
        )
        assert await asked(running.url, raw, 1 << 16) == [200]
        [request] = worker.arrived
        own = [name for name, _ in request.headers if name != b"host"]
        assert own == [b"x-c"]


async def test_names_with_underscores_are_other_names(start: Start) -> None:
    """The router takes none of them for its own, and changes none."""
    async with (
        scripted(echo) as worker,
        start(*BARE, "--api-key", "k", "--worker-urls", worker.url) as running,
    ):
        raw = b"GET /seen HTTP/1.1\r\nHost: localhost\r\nAuthorization_: Bearer k\r\nConnection: close\r\n%b\r\n"
        assert await asked(running.url, raw % b"", 1 << 16) == [401]
        shown = raw % b"Authorization: Bearer k\r\nX_Session_Id: s\r\n"
        assert await asked(running.url, shown, 1 << 16) == [200]
        assert worker.arrived[0].values(b"x_session_id") == [b"s"]
        assert worker.arrived[0].values(b"authorization") == []


async def test_encoded_line_breaks_stay_encoded(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for target in (b"/a%0d%0aX:%20y", b"/a?b=%0d%0a%0d%0aGET%20/hidden", b"/%0aGET%20/hidden%20HTTP/1.1"):
            assert await asked(
                running.url, b"GET %b HTTP/1.1\r\nConnection: close\r\n\r\n" % target, 1 << 16
            ) == [200]
            assert worker.arrived[-1].line == b"GET %b HTTP/1.1" % target
            assert written_by_the_router(worker.arrived[-1], worker)


WITHOUT_LENGTH = "an answer within one that has no length"
SPLITS = {
    WITHOUT_LENGTH: b"HTTP/1.1 200 OK\r\nX: a\r\n\r\n" + answer(b"hidden"),
    "two answers": answer(b"seen") + answer(b"hidden"),
    "an answer behind 204": b"HTTP/1.1 204 No Content\r\nContent-Length: 6\r\n\r\nhidden",
    "an answer behind an early one": b"HTTP/1.1 103 Early Hints\r\nX: a\r\n\r\n" + answer(b"seen") + answer(b"hidden"),
    "more than its length": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nseen" + answer(b"hidden"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPLITS)
async def test_an_answer_that_splits_is_one_answer_to_one_client(start: Start, what: str) -> None:
    async def split(wire: Wire) -> None:
        while request := await wire.request():
            if not request.line.startswith(b"GET /split "):
                await wire.send(answer(b"next"))
                continue
            await wire.send(SPLITS[what])
            if what == WITHOUT_LENGTH:
                return  # the body ends with the connection

    async with scripted(split) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        raw = b"GET /split HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        reply = await talk(running.url, raw)
        if what == WITHOUT_LENGTH:
            assert content(reply) == answer(b"hidden")
        else:
            assert b"hidden" not in reply
        assert (await running.client.get("/second")).content == b"next"
