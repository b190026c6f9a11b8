"""TLS, to workers and to clients: who they are is checked, who we are is shown, and a cut is no end."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trustme

from core.real import on_uvicorn
from core.servers import Wire, answer, content, dial, on_both_loops, scripted, talk
from deadlines import HANG_S
from holding import ready
from router_core.cli import build
from routers import BARE, Start
from slime_http.serving import serving
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: a CA, a server's certificate for 127.0.0.1, one for elsewhere and one of the past, a client's
    certificate; another CA, and certificates of that one.
    """

    ca: str
    server: str
    elsewhere: str
    expired: str
    client: str
    other_ca: str
    other_server: str
    other_client: str


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder: Path = tmp_path_factory.mktemp("certificates")
    past = datetime.now(UTC) - timedelta(days=2)
    for prefix in ("", "other_"):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(str(folder / f"{prefix}ca.pem"))
        for name, identity, ends in (
            ("server", "127.0.0.1", None),
            ("elsewhere", "example.org", None),
            ("expired", "127.0.0.1", past + timedelta(days=1)),
            ("client", "router@example.org", None),
        ):
            issued = ca.issue_cert(identity, not_before=past if ends else None, not_after=ends)
            issued.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{prefix}{name}.pem"))
    return Certificates(**{each.name: str(folder / f"{each.name}.pem") for each in fields(Certificates)})


async def test_a_tls_worker_is_reached_and_its_connection_kept(
    start: Start, certificates: Certificates
) -> None:
    body = random.Random(5).randbytes(3 << 20)
    with on_uvicorn("httptools", ssl_certfile=certificates.server) as url:
        async with start(*BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca) as running:
            for path in ("/echo", "/chunked"):
                assert (await running.client.post(path, content=body)).content == body
            assert len({(await running.client.get("/peer")).text for _ in range(4)}) == 1
            added = await running.client.post("/add_worker", params={"url": url})
            assert "warning" not in added.json()  # probes trust the same CA


def trust(running: Running) -> None:
    """They answered once; requests see for themselves."""
    for worker in running.router.pool:
        ready(running.router.pool, worker)


async def test_a_tls_worker_nobody_vouches_for_is_a_502(start: Start, certificates: Certificates) -> None:
    with on_uvicorn("httptools", ssl_certfile=certificates.server) as url:
        async with start(*BARE, "--worker-urls", url) as running:
            trust(running)
            reply = await running.client.get("/echo")
            assert reply.status_code == 502
            assert reply.json()["error"]["code"] == "WORKER_UNREACHABLE"
            assert "certificate verify failed" in reply.json()["error"]["message"].lower()
            assert running.router.proxy.open_connections == 0


async def test_a_tls_worker_with_anothers_certificate_is_a_502(
    start: Start, certificates: Certificates
) -> None:
    with on_uvicorn("httptools", ssl_certfile=certificates.elsewhere) as url:
        async with start(*BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca) as running:
            trust(running)
            reply = await running.client.get("/echo")
            assert reply.status_code == 502
            assert "127.0.0.1" in reply.json()["error"]["message"]


async def test_a_tls_worker_whose_certificate_has_expired_is_a_502(
    start: Start, certificates: Certificates
) -> None:
    with on_uvicorn("httptools", ssl_certfile=certificates.expired) as url:
        async with start(*BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca) as running:
            trust(running)
            reply = await running.client.get("/echo")
            assert reply.status_code == 502
            assert "expired" in reply.json()["error"]["message"]
            assert running.router.proxy.open_connections == 0


@pytest.mark.parametrize("named", [("other_server", "ca"), ("server", "other_ca")])
async def test_a_tls_worker_of_another_ca_is_a_502_and_stays_out(
    start: Start, certificates: Certificates, named: tuple[str, str]
) -> None:
    server, ca = (getattr(certificates, name) for name in named)
    with on_uvicorn("httptools", ssl_certfile=server) as url:
        async with start(*BARE, "--ca-cert-paths", ca) as running:
            added = await running.client.post("/add_worker", params={"url": url})
            assert "certificate verify failed" in added.json()["warning"].lower()
            assert [worker.state for worker in running.router.pool] == ["joining"]
            trust(running)
            assert (await running.client.get("/echo")).status_code == 502


def asking_for_certificates(certificates: Certificates) -> dict[str, Any]:
    return {
        "ssl_certfile": certificates.server,
        "ssl_ca_certs": certificates.ca,
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }


async def test_probes_show_our_certificate_too(start: Start, certificates: Certificates) -> None:
    """The look at a worker when it registers, the health checks, and control calls."""
    probing = ("--health-check-interval-secs", "0.05", "--health-check-endpoint", "/echo")
    with on_uvicorn("httptools", **asking_for_certificates(certificates)) as url:
        trusting = (*probing, "--ca-cert-paths", certificates.ca)
        async with start(*trusting, "--client-cert-path", certificates.client) as running:
            added = await running.client.post("/add_worker", params={"url": url})
            assert "warning" not in added.json()
            await anyio.sleep(0.3)  # some probes later
            assert [worker.state for worker in running.router.pool] == ["ready"]
            flushed = await running.client.post("/flush_cache")
            assert flushed.json()["workers"][url]["status"] != 502  # it was reached
        async with start(*trusting) as running:
            added = await running.client.post("/add_worker", params={"url": url})
            assert "warning" in added.json()
            assert [worker.state for worker in running.router.pool] == ["joining"]


async def test_a_certificate_of_another_ca_opens_no_worker(start: Start, certificates: Certificates) -> None:
    with on_uvicorn("httptools", **asking_for_certificates(certificates)) as url:
        flags = ("--worker-urls", url, "--ca-cert-paths", certificates.ca)
        async with start(*BARE, *flags, "--client-cert-path", certificates.other_client) as running:
            trust(running)
            assert (await running.client.post("/echo", content=b"unknown")).status_code == 502
            assert running.router.proxy.open_connections == 0


async def test_a_worker_that_asks_for_a_certificate_gets_ours(
    start: Start, certificates: Certificates
) -> None:
    with on_uvicorn("httptools", **asking_for_certificates(certificates)) as url:
        trusting = (*BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca)
        async with start(*trusting, "--client-cert-path", certificates.client) as running:
            assert (await running.client.post("/echo", content=b"known")).content == b"known"
        async with start(*trusting) as running:
            trust(running)
            reply = await running.client.post("/echo", content=b"unknown")
            assert reply.status_code == 502
            assert running.router.proxy.open_connections == 0


async def test_a_worker_that_does_not_speak_tls_is_a_502(start: Start) -> None:
    async def plain(wire: Wire) -> None:
        await wire.send(answer(b"plain"))
        await wire.until_closed()

    async with scripted(plain) as worker:
        url = worker.url.replace("http:", "https:")
        async with start(*BARE, "--worker-urls", url) as running:
            trust(running)
            assert (await running.client.get("/")).status_code == 502
            assert running.router.proxy.open_connections == 0


async def test_a_body_cut_without_the_closing_alert_is_broken(
    start: Start, certificates: Certificates
) -> None:
    async def script(wire: Wire) -> None:
        if request := await wire.request():
            await wire.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
            await anyio.sleep(0.05)  # what was sent is read before the end is seen
            if b"/cut" in request.line:
                await wire.cut()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    async with (
        scripted(script, tls=context) as worker,
        start(*BARE, "--worker-urls", worker.url, "--ca-cert-paths", certificates.ca) as running,
    ):
        whole = await talk(
            running.url, b"GET /polite HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert content(whole) == b"hello"
        cut = await talk(running.url, b"GET /cut HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"hello" in cut
        with pytest.raises(ValueError, match="without sending complete message body"):
            content(cut)


@asynccontextmanager
async def behind_tls(certificates: Certificates, *flags: str, timeout_s: float = 5) -> AsyncIterator[str]:
    """A router that serves https; its base URL."""
    _, app = build([*BARE, *flags])
    async with serving(app, client_timeout_s=timeout_s, ssl_certfile=certificates.server) as url:
        yield url


async def test_clients_are_served_over_tls(certificates: Certificates) -> None:
    trust = ssl.create_default_context(cafile=certificates.ca)
    with on_uvicorn("httptools") as worker:
        async with (
            behind_tls(certificates, "--worker-urls", worker) as url,
            httpx.AsyncClient(base_url=url, verify=trust, trust_env=False) as client,
        ):
            assert url.startswith("https://")
            assert (await client.get("/health")).json()["status"] == "ok"
            body = random.Random(6).randbytes(2 << 20)
            assert (await client.post("/echo", content=body)).content == body


@pytest.mark.parametrize(
    "sent",
    [b"GET /health HTTP/1.1\r\nHost: [::]\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\0" * 1000, b"POST / HTTP/1.1\r\n" * 99],
    ids=["a request", "a broken hello", "zeros", "many lines"],
)  # fmt: skip
async def test_plain_http_gets_no_answer_from_a_tls_port(certificates: Certificates, sent: bytes) -> None:
    trust = ssl.create_default_context(cafile=certificates.ca)
    async with (
        behind_tls(certificates) as url,
        httpx.AsyncClient(base_url=url, verify=trust, trust_env=False) as client,
    ):
        loop = asyncio.get_running_loop()
        with await dial(url) as raw, anyio.fail_after(HANG_S):
            await loop.sock_sendall(raw, sent)
            raw.shutdown(socket.SHUT_WR)
            try:
                received = await loop.sock_recv(raw, 1 << 16)
            except ConnectionResetError:
                received = b""
        assert b"HTTP" not in received
        assert (await client.get("/health")).status_code == 200


async def test_tls_to_a_plain_port_is_refused_and_told_nothing(start: Start) -> None:
    async with start(*BARE) as running:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(running.url.replace("http:", "https:") + "/health")
        assert (await running.client.get("/health")).status_code == 200
