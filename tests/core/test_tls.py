"""Workers behind TLS: who they are is checked, who we are is shown, and a cut is no end."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import trustme

from core.real import on_uvicorn
from core.servers import Wire, answer, content, on_both_loops, scripted, talk
from routers import Start

pytestmark = [pytest.mark.anyio, on_both_loops]

BARE = "--no-default-plugins"


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: a CA, a server's certificate for 127.0.0.1 and one for elsewhere, a client's certificate."""

    ca: str
    server: str
    elsewhere: str
    client: str


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder: Path = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, identity in (
        ("server", "127.0.0.1"),
        ("elsewhere", "example.org"),
        ("client", "router@example.org"),
    ):
        ca.issue_cert(identity).private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
    return Certificates(*(str(folder / f"{name}.pem") for name in ("ca", "server", "elsewhere", "client")))


async def test_a_tls_worker_is_reached_and_its_connection_kept(
    start: Start, certificates: Certificates
) -> None:
    body = random.Random(5).randbytes(3 << 20)
    with on_uvicorn("httptools", ssl_certfile=certificates.server) as url:
        async with start(BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca) as running:
            for path in ("/echo", "/chunked"):
                assert (await running.client.post(path, content=body)).content == body
            assert len({(await running.client.get("/peer")).text for _ in range(4)}) == 1
            added = await running.client.post("/add_worker", params={"url": url})
            assert "warning" not in added.json()  # probes trust the same CA


async def test_a_tls_worker_nobody_vouches_for_is_a_502(start: Start, certificates: Certificates) -> None:
    with on_uvicorn("httptools", ssl_certfile=certificates.server) as url:
        async with start(BARE, "--worker-urls", url) as running:
            reply = await running.client.get("/echo")
            assert reply.status_code == 502
            assert reply.json()["error"]["code"] == "WORKER_UNREACHABLE"
            assert "certificate verify failed" in reply.json()["error"]["message"].lower()
            assert running.router.proxy.open_connections == 0


async def test_a_tls_worker_with_anothers_certificate_is_a_502(
    start: Start, certificates: Certificates
) -> None:
    with on_uvicorn("httptools", ssl_certfile=certificates.elsewhere) as url:
        async with start(BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca) as running:
            reply = await running.client.get("/echo")
            assert reply.status_code == 502
            assert "127.0.0.1" in reply.json()["error"]["message"]


async def test_a_worker_that_asks_for_a_certificate_gets_ours(
    start: Start, certificates: Certificates
) -> None:
    mutual = {
        "ssl_certfile": certificates.server,
        "ssl_ca_certs": certificates.ca,
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }
    with on_uvicorn("httptools", **mutual) as url:
        trusting = (BARE, "--worker-urls", url, "--ca-cert-paths", certificates.ca)
        async with start(*trusting, "--client-cert-path", certificates.client) as running:
            assert (await running.client.post("/echo", content=b"known")).content == b"known"
        async with start(*trusting) as running:
            reply = await running.client.post("/echo", content=b"unknown")
            assert reply.status_code == 502
            assert running.router.proxy.open_connections == 0


async def test_a_worker_that_does_not_speak_tls_is_a_502(start: Start) -> None:
    async def plain(wire: Wire) -> None:
        await wire.send(answer(b"plain"))
        await wire.until_closed()

    async with scripted(plain) as worker:
        url = worker.url.replace("http:", "https:")
        async with start(BARE, "--worker-urls", url) as running:
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
        start(BARE, "--worker-urls", worker.url, "--ca-cert-paths", certificates.ca) as running,
    ):
        whole = await talk(running.url, b"GET /polite HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert content(whole) == b"hello"
        cut = await talk(running.url, b"GET /cut HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"hello" in cut
        with pytest.raises(ValueError, match="without sending complete message body"):
            content(cut)
