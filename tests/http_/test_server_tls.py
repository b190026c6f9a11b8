"""The server behind TLS, whose transports differ: the same answers, limits and ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import trustme

from core.servers import dial, on_both_loops
from deadlines import until
from http_.conversations import GET, GET_1_0, SOON_S, WireClient, alone, body_of, respond, watch_server
from slime_http.asgi import ASGIApp, Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
LARGE = bytes(range(256)) * (32 << 10)
TIMEOUT_S = 0.3


@dataclass(frozen=True)
class Authority:
    """A server's certificate, and a client's trust in it."""

    certificate: str
    trust: ssl.SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    path: Path = tmp_path_factory.mktemp("authority") / "server.pem"
    ca = trustme.CA()
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(trust)
    return Authority(str(path), trust)


class SecureClient(WireClient):
    """A client that speaks through TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer.get_extra_info("socket"))
        self._reader = reader
        self._writer = writer

    async def send(self, piece: bytes) -> None:
        self._writer.write(piece)
        await self._writer.drain()

    async def receive(self) -> bytes:
        return await self._reader.read(1 << 18)

    def hang_up(self) -> None:
        """Close without a word of TLS."""
        self._writer.transport.abort()


@asynccontextmanager
async def secured(url: str, authority: Authority) -> AsyncIterator[SecureClient]:
    host, _, port = url.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=authority.trust, server_hostname=host)
    try:
        yield SecureClient(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def talking(
    app: ASGIApp, authority: Authority, *, client_timeout_s: float = 300.0
) -> AsyncIterator[SecureClient]:
    async with (
        serving(alone(app), client_timeout_s=client_timeout_s, ssl_certfile=authority.certificate) as url,
        secured(url, authority) as client,
    ):
        yield client


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await body_of(receive)
    if body is not None:
        await respond(send, scope["scheme"].encode(), scope["raw_path"], body)


async def test_requests_and_answers_of_all_sizes_pass(authority: Authority) -> None:
    async with talking(echo, authority) as client:
        await client.say(GET[:7], GET[7:] + 20 * GET)
        for _ in range(21):
            assert (await client.answer()).body == b"https/"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.say, (POST % (b"", len(LARGE))) + LARGE)
            assert (await client.answer()).body == b"https/" + LARGE


async def test_a_body_is_held_back_and_goes_on(authority: Authority) -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.1)
        await echo(scope, receive, send)

    async with talking(late, authority) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.say, 3 * ((POST % (b"", len(LARGE))) + LARGE))
        for _ in range(3):
            assert (await client.answer()).body == b"https/" + LARGE


async def test_behind_a_close_nothing_is_begun(authority: Authority) -> None:
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await respond(send, b"ok")

    async with talking(app, authority) as client:
        closing = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        await client.say(closing, GET.replace(b"/", b"/1", 1) + GET.replace(b"/", b"/2", 1))
        assert (await client.answer()).body == b"ok"
        assert await client.rest() == b""
    assert begun == ["/"]


async def test_a_broken_answer_is_seen_to_be_broken(authority: Authority) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("in the body")

    for request in (GET, GET_1_0):
        async with talking(app, authority) as client:
            await client.say(request)
            with pytest.raises((EOFError, ConnectionResetError)):
                await client.answer()


async def test_a_client_that_hangs_up_is_noticed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_server(monkeypatch)
    begun, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        assert await body_of(receive) is None
        told.set()

    async with talking(app, authority) as client:
        await client.say((POST % (b"", 4)) + b"ab")
        with anyio.fail_after(SOON_S):
            await begun.wait()
            client.hang_up()
            await told.wait()
            await until(lambda: seen.open == 0)


async def test_limits_hold(authority: Authority) -> None:
    async with talking(echo, authority, client_timeout_s=0.3) as client:
        await client.say((POST % (b"", 4)) + b"ab")
        assert (await client.answer()).status == 408
        assert await client.rest() == b""
    async with talking(echo, authority) as client:
        await client.say(b"NONSENSE\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_a_client_that_takes_nothing_is_cut_off(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_server(monkeypatch)
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        request = receive.__self__  # type: ignore[attr-defined]  # nothing is said when a send does nothing
        while not request.disconnected:
            await send({"type": "http.response.body", "body": LARGE, "more_body": True})
            await anyio.sleep(0.001)
        done.set()

    async with talking(app, authority, client_timeout_s=0.3) as client:
        await client.say(GET)
        with anyio.fail_after(SOON_S):
            await done.wait()
        await until(lambda: seen.open == 0)


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_a_client_that_takes_a_large_answer_slowly_gets_all_of_it(
    authority: Authority, connection: bytes
) -> None:
    body = bytes(range(256)) * (32 << 12)  # of which the kernel takes a few MiB

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, body)

    async with serving(alone(app), client_timeout_s=TIMEOUT_S, ssl_certfile=authority.certificate) as url:
        raw = await dial(url, receive_buffer=64 * 1024)
        streams = await asyncio.open_connection(sock=raw, ssl=authority.trust, server_hostname="127.0.0.1")
        client = SecureClient(*streams)
        try:
            await client.say(GET.replace(b"\r\n\r\n", b"\r\nConnection: %b\r\n\r\n" % connection))
            began, heard = anyio.current_time(), bytearray()
            while not heard.endswith(body[-256:]) or len(heard) < len(body):
                piece = await client.receive()
                assert piece, f"cut off after {len(heard)} bytes"
                heard += piece
                await anyio.sleep(0.01)
            assert anyio.current_time() - began > 2 * TIMEOUT_S
            assert heard.partition(b"\r\n\r\n")[2] == body
        finally:
            client.hang_up()


async def test_a_client_that_does_not_close_tls_is_closed_in_its_time(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has its whole answer, so nothing is logged."""
    seen = watch_server(monkeypatch)
    async with serving(alone(echo), client_timeout_s=TIMEOUT_S, ssl_certfile=authority.certificate) as url:

        def get() -> ssl.SSLSocket:
            host, _, port = url.removeprefix("https://").rpartition(":")
            raw = socket.create_connection((host, int(port)), SOON_S)
            secure = authority.trust.wrap_socket(raw, server_hostname=host)
            secure.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            answer = b"".join(iter(lambda: secure.recv(1 << 16), b""))
            assert answer.endswith(b"https/")
            return secure

        with await anyio.to_thread.run_sync(get), anyio.fail_after(SOON_S):
            await until(lambda: seen.open == 0)
    assert caplog.messages == []


async def test_idle_connections_close_at_shutdown(authority: Authority) -> None:
    async with AsyncExitStack() as clients:
        async with serving(alone(echo), ssl_certfile=authority.certificate) as url:
            client = await clients.enter_async_context(secured(url, authority))
            await client.say(GET)
            assert (await client.answer()).body == b"https/"
            began = anyio.current_time()
        assert await client.rest() == b""
        assert anyio.current_time() - began < 2


async def test_a_connection_that_opens_during_shutdown_closes(authority: Authority) -> None:
    """One that is still in its handshake is not there yet when the others are told."""
    go_on = asyncio.Event()
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await go_on.wait()
        await respond(send, b"ok")

    async with AsyncExitStack() as clients, anyio.create_task_group() as tasks:
        async with serving(alone(app), ssl_certfile=authority.certificate, grace_s=SOON_S) as url:
            busy, idle = [await clients.enter_async_context(secured(url, authority)) for _ in range(2)]
            raw = await dial(url)
            await busy.say(GET)
            await begun.wait()

            async def open_late() -> None:
                assert await idle.rest() == b""  # the others were told
                streams = await asyncio.open_connection(
                    sock=raw, ssl=authority.trust, server_hostname="127.0.0.1"
                )
                late = SecureClient(*streams)
                try:
                    with anyio.fail_after(SOON_S / 2):
                        assert await late.rest() == b""
                finally:
                    late.hang_up()
                    go_on.set()

            tasks.start_soon(open_late)
        assert (await busy.answer()).body == b"ok"
