"""Addresses that workers may have: no registration opens a way into the router's network."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest

from core.servers import Wire, answer, on_both_loops, scripted
from holding import ready
from router_core.cli import build, main
from router_core.errors import BadRequest, SettingsError, WorkerUnreachable
from router_core.workers import worker_url
from routers import BARE, Start
from slime_auth.addresses import WorkerAddresses, is_loopback
from slime_http.limits import Limits
from slime_http.upstream import Upstream

#: 169.254.169.254 and others that are never meant, in all the ways in which a resolver takes them.
REFUSED = [
    *("169.254.169.254", "169.254.0.1", "169.254.170.2", "2852039166", "0xa9fea9fe", "0xA9FEA9FE"),
    *("169.254.43518", "169.16689662", "0251.0376.0251.0376", "0xa9.0xfe.0xa9.0xfe", "0xa9.254.0251.254"),
    *("025177524776", "169.254.0xa9fe", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]"),
    *("[0:0:0:0:0:ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::]", "[::ffff:0:a9fe:a9fe]"),
    *(
        "[fe80::1]",
        "[FE80::a9fe:a9fe]",
        "[febf::1]",
        "[fd00:ec2::254]",
        "[fd00:0ec2:0::254]",
        "[fd20:ce::254]",
    ),
    *("[64:ff9b:1::a9fe:a9fe]", "[64:ff9b:1:a9fe:a9:fe00::]"),
    *("metadata.google.internal", "METADATA.google.internal", "metadata.goog", "instance-data"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "0.0.0.0", "0", "0x0", "0.1", "0.0.0.1", "[::]"),
    *("[::ffff:0.0.0.0]", "224.0.0.1", "239.255.255.250", "255.255.255.255", "4294967295", "[ff02::1]"),
]
ALLOWED = [
    *(
        "10.0.0.7",
        "127.0.0.1",
        "localhost",
        "192.168.1.1",
        "172.16.0.1",
        "8.8.8.8",
        "100.100.100.201",
        "[::1]",
    ),
    *("[fd00::1]", "[2001:db8::1]", "[::ffff:10.0.0.7]", "engine-0", "engine-0.engines.svc.cluster.local"),
    *("metadata.example.org", "169.254.example.org", "0x7f.example.org", "2130706433", "gpu_node_7"),
]


@pytest.mark.parametrize("host", REFUSED)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_that_no_worker_has_is_refused(scheme: str, host: str) -> None:
    with pytest.raises(BadRequest, match="--allow-worker"):
        WorkerAddresses().check(worker_url(f"{scheme}://{host}:30000"))


@pytest.mark.parametrize("host", ALLOWED)
def test_any_other_address_may_be_a_workers(host: str) -> None:
    WorkerAddresses().check(worker_url(f"http://{host}:30000"))


#: A pattern, what it lets in, and what it does not.
PATTERNS = {
    "10.0.0.0/16": (["http://10.0.0.7", "https://10.0.255.1:1"], ["http://10.1.0.1", "http://10.0.evil"]),
    "10.0.0.7": (["http://10.0.0.7:1", "http://167772167"], ["http://10.0.0.8", "http://10.0.0.7.evil"]),
    "10.0.0.7:30000": (["http://10.0.0.7:30000"], ["http://10.0.0.7", "http://10.0.0.7:30001"]),
    "https://10.0.0.0/8": (["https://10.0.0.7:1"], ["http://10.0.0.7:1"]),
    "http://10.0.0.0/8:80": (["http://10.0.0.7"], ["https://10.0.0.7", "http://10.0.0.7:443"]),
    "[fd00::/8]:30000": (["http://[fd12::1]:30000"], ["http://[fd12::1]", "http://[fe00::1]:30000"]),
    "fd00::/8": (["http://[fd12::1]:30000"], ["http://[2001:db8::1]", "http://fd"]),
    "::1": (["http://[::1]:1"], ["http://[::2]:1", "http://127.0.0.1:1"]),
    "[::1]:1": (["http://[::1]:1"], ["http://[::1]:2"]),
    "engine-*": (["http://engine-0", "http://engine-12:7"], ["http://engine-0.evil", "http://engine", "http://10.0.0.1"]),
    "Engine-?": (["http://engine-0"], ["http://engine-10"]),
    "*.engines.svc": (["http://a.engines.svc"], ["http://a.b.engines.svc", "http://engines.svc", "http://aXenginesXsvc"]),
    "*.*.svc": (["http://a.b.svc"], ["http://a.svc", "http://a.b.svc.evil"]),
    "*": (["http://a", "http://10.0.0.1", "http://[::1]"], ["http://169.254.169.254", "http://metadata.goog"]),
    "*:30000": (["http://a:30000", "http://10.0.0.1:30000"], ["http://a", "http://10.0.0.1:22"]),
    "https://*": (["https://a"], ["http://a"]),
    "0.0.0.0/0": (["http://10.0.0.1"], ["http://169.254.169.254", "http://0.0.0.0", "http://a", "http://[::1]"]),
    # Addresses that nobody means unless they say so:
    "169.254.0.0/16": (["http://169.254.1.1", "http://2852039166"], ["http://10.0.0.1"]),
    "169.254.169.254": (["http://169.254.169.254"], ["http://169.254.169.253"]),
    "169.254.7.0/24:30000": (["http://169.254.7.1:30000"], ["http://169.254.7.1:80", "http://169.254.8.1:30000"]),
    "[64:ff9b:1::/96]": (["http://[64:ff9b:1::a00:1]"], ["http://[64:ff9b:1:1::1]"]),
    "[fe80::/10]": (["http://[fe80::1]"], ["http://[::1]"]),
    "metadata.goog": (["http://metadata.goog"], ["http://metadata.google.internal"]),
    "metadata.*": (["http://metadata.x"], ["http://metadata.goog"]),
    "0.0.0.0:30000": (["http://0.0.0.0:30000"], ["http://0.0.0.0"]),
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_lets_in_what_it_names_and_nothing_else(pattern: str) -> None:
    addresses = WorkerAddresses.parse([pattern])
    named, others = PATTERNS[pattern]
    for url in named:
        addresses.check(worker_url(url))
    for url in others:
        with pytest.raises(BadRequest, match="--allow-worker"):
            addresses.check(worker_url(url))


@pytest.mark.parametrize(
    ("listens", "own", "others"),
    [
        ("127.0.0.1", ["http://127.0.0.1:30000", "https://127.1:30000"], ["http://127.0.0.2:30000"]),
        ("0.0.0.0", ["http://127.0.0.1:30000", "http://127.8.8.8:30000"], ["http://192.0.2.7:30000"]),
        ("::", ["http://[::1]:30000"], ["http://[2001:db8::7]:30000"]),
        ("a-name", [], ["http://127.0.0.1:30000"]),
    ],
)
def test_no_router_is_its_own_worker(listens: str, own: list[str], others: list[str]) -> None:
    addresses = WorkerAddresses.parse([], (listens, 30000))
    for url in own:
        with pytest.raises(BadRequest, match="is this router itself"):
            addresses.check(worker_url(url))
    for url in (*others, "http://127.0.0.1:30001", "http://localhost:30000"):
        addresses.check(worker_url(url))


@pytest.mark.anyio
async def test_router_cannot_be_registered_at_itself(start: Start) -> None:
    async with start(*BARE, "--port", "23456") as running:
        for url in ("http://127.0.0.1:23456", "http://localhost:23456"):
            for reply in (
                await running.client.post("/workers", json={"url": url}),
                await running.client.post(f"/add_worker?url={url}"),
            ):
                assert (reply.status_code, "this router itself" in reply.text) == (400, True), url
    with pytest.raises(SettingsError, match=r"--worker-urls: .* is this router itself"):
        build([*BARE, "--port", "23456", "--worker-urls", "http://127.0.0.1:23456"])


def test_patterns_add_up() -> None:
    addresses = WorkerAddresses.parse(["engine-*", "10.0.0.0/8"])
    addresses.check("http://engine-1")
    addresses.check("http://10.9.9.9")
    with pytest.raises(BadRequest):
        addresses.check("http://11.0.0.1")
    insisting = WorkerAddresses.parse(["http://169.254.7.0/24:30000", "*"])
    insisting.check("http://169.254.7.1:30000")
    for url in (
        "http://169.254.7.1:80",
        "https://169.254.7.1:30000",
    ):  # any host, but this one not insisted on
        with pytest.raises(BadRequest, match=r"to allow it, add 169\.254\.7\.1 to --allow-worker"):
            insisting.check(url)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "http://", "ftp://a", "http://a/b", "a b", "user@a", "a:0", "a:65536", "a:x", "a:", "10.0.*", "10.?"),
        *("*.*", "10.0.0.0/33", "10.0.0.1/8", "[engine]", "[::1", "fd00::/8:1", "a,b", "[a-z]", "é", "a\n", "a?b:/"),
    ],
)  # fmt: skip
def test_invalid_pattern_ends_the_start_in_one_line(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="--allow-worker: wanted"):
        WorkerAddresses.parse([pattern])
    assert main(["--allow-worker", pattern]) == 2
    told = capsys.readouterr().err
    assert told.startswith("slime-router: --allow-worker: wanted ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ((), "http://169.254.169.254"),
        (("--allow-worker", "10.0.0.0/8"), "http://11.0.0.1:30000"),
        (("--allow-worker", "a", "--allow-worker", "b"), "http://c"),
    ],
)
def test_a_worker_that_may_not_be_ends_the_start_in_one_line(
    flags: tuple[str, ...], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--worker-urls", url]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"slime-router: --worker-urls: worker {url} ")
    assert "--allow-worker" in told
    assert told.count("\n") == 1


def test_patterns_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_ROUTER_ALLOW_WORKER", "[engine-*, 10.0.0.0/8]")
    assert main(["--worker-urls", "http://engine-1", "http://11.0.0.1"]) == 2
    assert "worker http://11.0.0.1 is not among the workers" in capsys.readouterr().err


@pytest.mark.anyio
async def test_every_way_to_register_a_worker_is_checked(start: Start) -> None:
    async with start(*BARE, "--allow-worker", "10.0.0.0/8") as running:
        client = running.client
        for url in ("http://11.0.0.1:1", "http://169.254.169.254", "http://a"):
            for reply in (
                await client.post("/add_worker", params={"url": url}),
                await client.post("/add_worker", params={"worker_url": url}),
                await client.post("/add_worker", json={"url": url}),
                await client.post("/workers", json={"url": url}),
            ):
                assert reply.status_code == 400, url
                assert reply.json()["error"]["code"] == "BAD_REQUEST"
                assert "--allow-worker" in reply.json()["error"]["message"]
        assert len(running.router.pool) == 0


@pytest.mark.anyio
async def test_credentials_in_a_worker_url_are_refused_with_any_pattern(start: Start) -> None:
    async with start(*BARE, "--allow-worker", "*") as running:
        for url in ("http://user:word@10.0.0.1", "http://10.0.0.1@169.254.169.254", "http://@10.0.0.1"):
            reply = await running.client.post("/workers", json={"url": url})
            assert reply.status_code == 400
        assert len(running.router.pool) == 0


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    """Let ``names`` resolve to these addresses, one after the other; the last one stays."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        found = names.get(name)
        if found is None:
            return real(host, port, *arguments, **options)
        address = found.pop(0) if len(found) > 1 else found[0]
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(address, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.anyio
@pytest.mark.parametrize("leads_to", ["169.254.169.254", "0.0.0.0", "::ffff:169.254.169.254", "fe80::1"])
async def test_a_name_that_leads_to_such_an_address_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch, leads_to: str
) -> None:
    resolving(monkeypatch, {"rebound.example": [leads_to]})
    async with start(*BARE) as running:
        for url in ("http://rebound.example:1", "https://rebound.example"):
            reply = await running.client.post("/workers", json={"url": url})
            assert reply.status_code == 400
            assert leads_to in reply.json()["error"]["message"]
            assert "to allow it, add rebound.example to --allow-worker" in reply.json()["error"]["message"]
        assert len(running.router.pool) == 0
    await WorkerAddresses.parse(["rebound.example"]).admit("http://rebound.example:1")
    with pytest.raises(BadRequest):
        await WorkerAddresses.parse(["*.example"]).admit("http://rebound.example:1")


@pytest.mark.anyio
async def test_a_name_that_does_not_resolve_yet_is_let_in(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {"later.example": [""]})
    async with start(*BARE) as running:
        reply = await running.client.post("/workers", json={"url": "http://later.example:1"})
        assert reply.status_code == 202
        assert "warning" in reply.json()


class Nowhere(WorkerAddresses):
    """Takes loopback for a reserved address: no test can listen at a real one."""

    def reachable(self, url: str, address: str) -> bool:
        return address != "127.0.0.1"


@pytest.mark.anyio
@on_both_loops
async def test_a_server_at_such_an_address_is_told_nothing() -> None:
    """However the name in the URL came to lead there."""
    heard = bytearray()

    async def listen(wire: Wire) -> None:
        while piece := await wire.receive(1 << 16):
            heard.extend(piece)

    async with scripted(listen) as server:
        upstream = Upstream(server.url, Limits(), reachable=Nowhere().reachable)
        told = r"127\.0\.0\.1, a reserved address: add 127\.0\.0\.1 to --allow-worker"
        with anyio.fail_after(5), pytest.raises(WorkerUnreachable, match=told):
            await upstream.request("POST", b"/generate", [(b"authorization", b"secret")], b"body")
        await anyio.sleep(0.05)
        assert (bytes(heard), upstream.open_connections) == (b"", 0)
        upstream.close()


@pytest.mark.anyio
@on_both_loops
async def test_a_name_that_moves_is_caught_when_it_is_connected_to(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By traffic, and by the router's own look at the worker."""
    heard = bytearray()

    async def listen(wire: Wire) -> None:
        while piece := await wire.receive(1 << 16):
            heard.extend(piece)

    monkeypatch.setattr(WorkerAddresses, "reachable", Nowhere.reachable)
    async with scripted(listen) as server, start(*BARE) as running:
        worker, trouble = await running.router.add_worker(server.url)
        assert trouble is not None
        assert "127.0.0.1, a reserved address" in trouble
        assert (worker.state, bytes(heard)) == ("joining", b"")
        ready(running.router.pool, worker)  # its name led elsewhere once
        reply = await running.client.post("/generate", content=b"body")
        assert reply.status_code == 502
        assert "127.0.0.1, a reserved address" in reply.json()["error"]["message"]
        assert bytes(heard) == b""
        assert running.router.proxy.open_connections == 0


@pytest.mark.anyio
async def test_no_redirect_of_a_worker_is_followed(start: Start) -> None:
    async with scripted(lambda wire: wire.until_closed()) as elsewhere:

        async def redirect(wire: Wire) -> None:
            while await wire.request():
                place = b"Location: " + elsewhere.url.encode() + b"/secret"
                await wire.send(answer(b"", place, status=b"307 Temporary Redirect"))

        async with scripted(redirect) as worker, start(*BARE, "--worker-urls", worker.url) as running:
            for method in ("GET", "POST"):
                reply = await running.client.request(method, "/generate")
                assert reply.status_code == 307
                assert reply.headers["location"] == f"{elsewhere.url}/secret"
        assert (elsewhere.accepted, elsewhere.probed) == (0, 0)


@pytest.mark.anyio
async def test_the_look_at_a_worker_follows_no_redirect_either(start: Start) -> None:
    asked: list[bytes] = []

    async def listen(wire: Wire) -> None:
        while piece := await wire.receive(1 << 16):
            asked.append(piece)

    async with scripted(listen) as elsewhere:

        async def redirect(wire: Wire) -> None:
            if await wire.receive(1 << 16):
                place = b"Location: " + elsewhere.url.encode() + b"/secret"
                await wire.send(answer(b"", place, status=b"302 Found"))

        async with scripted(redirect) as worker, start(*BARE) as running:
            added = await running.client.post("/workers", json={"url": worker.url})
            assert "warning" not in added.json()  # it answers, whatever it says
        assert asked == []


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)),
        *(("::", False), ("10.0.0.1", False), ("localhost.evil", False), ("gpu-7", False), ("", False)),
    ],
)
def test_only_loopback_is_this_machine_alone(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "127.0.0.1"), False),
        (("--host", "0.0.0.0", "--api-key", "k"), False),
        (("--host", "0.0.0.0", "--admin-api-key", "k"), False),
        (("--host", "0.0.0.0", "--control-plane-api-keys", "ops:Ops:admin:k"), False),
    ],
)
def test_listening_for_others_without_a_key_is_worth_a_warning(
    flags: tuple[str, ...],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router_core.cli.run", lambda _, sock, **__: sock.close())
    assert main([*BARE, "--port", "0", *flags]) == 0
    assert ("no key is set" in caplog.text) is warned
