"""Keys: what each of them opens, however a path is written, and that nobody else ever sees them."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from auth.surface import ADMIN, CONTROL, DATA, OPEN, OWN, TRAFFIC, status
from core.servers import Scripted, Wire, answer, dial, scripted, talk
from plugged import Recording
from router_core import hookimpl
from router_core.cli import build, main
from router_core.errors import SettingsError
from router_core.router import Router
from router_core.settings import Secret
from router_core.types import Receive, Scope, Send
from router_core.workers import Worker, auth_headers
from routers import BARE, Start
from slime_auth.access import Keys, Level
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

BOTH = ("--api-key", TRAFFIC, "--admin-api-key", ADMIN)


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


@asynccontextmanager
async def guarded(start: Start, *flags: str) -> AsyncIterator[tuple[Running, Scripted]]:
    async with scripted(echo) as worker, start(*flags, "--worker-urls", worker.url) as running:
        yield running, worker


async def test_without_keys_everything_is_open(start: Start) -> None:
    async with guarded(start, *BARE) as (running, _):
        for line in (*OPEN, *DATA, *CONTROL, *OWN):
            assert await status(running, line) not in (401, 403), line


async def test_the_traffic_key_opens_traffic_and_the_admin_key_everything(start: Start) -> None:
    async with guarded(start, *BARE, *BOTH) as (running, worker):
        for line in OPEN:
            assert await status(running, line) == 200, line
        for line in DATA:
            assert await status(running, line) == 401, line
            assert await status(running, line, "wrong") == 401, line
            assert await status(running, line, TRAFFIC) == 200, line
            assert await status(running, line, ADMIN) == 200, line
        assert len(worker.arrived) == 2 * len(DATA)
        for line in (*CONTROL, *OWN):
            assert await status(running, line) == 401, line
            assert await status(running, line, "wrong") == 401, line
            assert await status(running, line, TRAFFIC) == 403, line
        assert len(worker.arrived) == 2 * len(DATA)
        for line in (*CONTROL, *OWN):
            assert await status(running, line, ADMIN) not in (401, 403), line
        assert await status(running, "GET /weight_version", TRAFFIC) == 200
        assert await status(running, "GET /weight_version") == 401


async def test_a_single_key_opens_everything_when_it_is_the_traffics(start: Start) -> None:
    async with guarded(start, *BARE, "--api-key", TRAFFIC) as (running, _):
        for line in (*DATA, *CONTROL, *OWN):
            assert await status(running, line) == 401, line
            assert await status(running, line, TRAFFIC) not in (401, 403), line
        assert await status(running, "GET /health") == 200


async def test_beside_an_admin_key_alone_traffic_is_open(start: Start) -> None:
    async with guarded(start, *BARE, "--admin-api-key", ADMIN) as (running, _):
        for line in DATA:
            assert await status(running, line) == 200, line
            assert await status(running, line, "the workers own") == 200, line
        for line in (*CONTROL, *OWN):
            assert await status(running, line) == 401, line
            assert await status(running, line, "wrong") == 401, line
            assert await status(running, line, ADMIN) not in (401, 403), line


async def test_control_is_the_admins_with_the_plugin_too(start: Start) -> None:
    async with guarded(start, *BOTH, "--disable-health-check") as (running, worker):
        for path in ("/flush_cache", "/update_weights_from_disk", "/pause_generation", "/abort_request"):
            assert await status(running, f"POST {path}", TRAFFIC) == 403, path
            assert await status(running, f"POST {path}") == 401, path
        assert worker.arrived == []
        assert await status(running, "POST /flush_cache", ADMIN) == 200
        assert [request.values(b"authorization") for request in worker.arrived] == [[]]


class Routes:
    """A plugin with routes of each kind."""

    @hookimpl
    def routes(self, router: Router) -> list[Route | Mount]:
        async def own(request: Request) -> Response:
            return Response(f"{request.url.path} {request.headers.get('authorization')}")

        return [
            Route("/own", own),
            Route("/own/{name}", own),
            Mount("/mounted", routes=[Route("/{name}", own)]),
        ]


def make_plugin(_: argparse.Namespace) -> Routes:
    return Routes()


async def test_plugin_routes_need_the_traffic_key_and_lookalikes_the_admin_key(start: Start) -> None:
    plugin = (*BARE, "--middleware-paths", f"{__name__}:make_plugin")
    async with guarded(start, *BOTH, *plugin) as (running, worker):
        for path in ("/own", "/own/a", "/own/..", "/own/%2e%2e", "/mounted/a", "/%6fwn", "/own?a=b"):
            assert await status(running, f"GET {path}") == 401, path
            assert await status(running, f"GET {path}", TRAFFIC) == 200, path
        assert await status(running, "POST /own/a", TRAFFIC) == 405
        for path in ("/own/a/b", "/own/../flush_cache", "/own/", "/ownother", "/mounted", "/own%0A"):
            assert await status(running, f"GET {path}", TRAFFIC) == 403, path
        assert worker.arrived == []


BEARERS = {
    f"Bearer {TRAFFIC}": 200,
    f"bearer {TRAFFIC}": 200,
    f"BEARER  {TRAFFIC} ": 200,
    f"Bearer\t{TRAFFIC}": 200,
    f"Bearer {TRAFFIC}x": 401,
    f"Bearer {TRAFFIC[:-1]}": 401,
    f"Bearer {TRAFFIC.upper()}": 401,
    f"Bearer {TRAFFIC}, Bearer {TRAFFIC}": 401,
    f"Bearer x {TRAFFIC}": 401,
    f"Basic {TRAFFIC}": 401,
    f"Bearer{TRAFFIC}": 401,
    f"Bearer: {TRAFFIC}": 401,
    TRAFFIC: 401,
    "Bearer": 401,
    "Bearer \xff": 401,
    "": 401,
}


async def test_a_key_counts_as_a_bearer_token_and_as_nothing_else(start: Start) -> None:
    async with guarded(start, *BARE, *BOTH) as (running, worker):
        for value, expected in BEARERS.items():
            head = f"GET /generate HTTP/1.1\r\nHost: localhost\r\nAuthorization: {value}\r\nConnection: close\r\n\r\n"
            reply = await talk(running.url, head.encode("latin-1"))
            assert int(reply[9:12]) == expected, value
        assert all(request.values(b"authorization") == [] for request in worker.arrived)


async def test_a_refusal_says_what_is_wanted(start: Start) -> None:
    async with guarded(start, *BARE, *BOTH) as (running, _):
        missing = await running.client.post("/generate", json={})
        assert missing.status_code == 401
        assert missing.headers["www-authenticate"] == "Bearer"
        assert missing.json()["error"]["type"] == "authentication_error"
        assert missing.json()["error"]["code"] == "UNAUTHORIZED"
        wrong = await running.client.get("/workers", headers={"authorization": f"Bearer {TRAFFIC}"})
        assert wrong.status_code == 403
        assert wrong.json()["error"]["type"] == "permission_error"
        assert "--admin-api-key" in wrong.json()["error"]["message"]


async def test_openais_client_calls_it_an_authentication_error(start: Start) -> None:
    openai = pytest.importorskip("openai")
    async with guarded(start, *BARE, *BOTH) as (running, _):
        for key, error in (("wrong", "AuthenticationError"), (TRAFFIC, "PermissionDeniedError")):
            async with openai.AsyncOpenAI(
                base_url=f"{running.url}/v1", api_key=key, max_retries=0, http_client=None
            ) as client:
                with pytest.raises(getattr(openai, error)):
                    await client.post("/load_lora_adapter", body={}, cast_to=object)


async def test_a_request_is_refused_before_its_body_is_there(start: Start) -> None:
    loop = asyncio.get_running_loop()
    async with guarded(start, *BOTH) as (running, worker):
        for path in ("/generate", "/workers", "/flush_cache"):
            head = f"POST {path} HTTP/1.1\r\nHost: [::]\r\nContent-Length: 400000000\r\nExpect: 100-continue\r\n\r\n"
            with await dial(running.url) as raw, anyio.fail_after(1):
                await loop.sock_sendall(raw, head.encode())
                reply = await loop.sock_recv(raw, 1 << 16)
                assert reply.startswith(b"HTTP/1.1 401 "), path  # and no 100 before it
                assert b"\r\nconnection: close\r\n" in reply
        assert worker.arrived == []


async def test_the_routers_keys_reach_no_worker_and_other_ones_do(start: Start) -> None:
    async with guarded(start, *BARE, "--admin-api-key", ADMIN) as (running, worker):
        hidden = [f"Bearer {ADMIN}", f"bearer   {ADMIN}", ADMIN, f"Basic {ADMIN}", f"Token {ADMIN}"]
        hidden += [
            f"Bearer {ADMIN}, Bearer theirs",
            f"Bearer {ADMIN},",
            f"Bearer {ADMIN} x",
            f"{ADMIN} x",
            f"{ADMIN}, x",
            f"Digest key={ADMIN}",
            f"Digest key=={ADMIN}",
            f'Bearer "{ADMIN}"',
            f"Bearer '{ADMIN}'",
            f"Bearer <{ADMIN}>",
            f"Bearer:{ADMIN}",
            f"user:{ADMIN}",
            f"{ADMIN}=",
            f"Basic {b64encode(f'user:{ADMIN}'.encode()).decode()}",
            f"Bearer theirs, basic {b64encode(f'{ADMIN}:'.encode()).decode()}",
            "=" * 513,
            "many " * 65 + "x",
        ]
        passed = ["Bearer theirs", "Basic dTpw", "", f"Bearer {ADMIN}x", 'Digest username="a", realm="b"']
        passed += [f"Bearer x{ADMIN}", f"Bearer {ADMIN}-x", "Basic d", "Bearer " + "x" * 2000, "=" * 512]
        for value in (*hidden, *passed):
            reply = await running.client.get("/generate", headers={"authorization": value, "x-a": "1"})
            assert reply.status_code == 200, value
        assert [request.values(b"authorization") for request in worker.arrived[: len(hidden)]] == [[]] * len(
            hidden
        )
        kept = [request.values(b"authorization") for request in worker.arrived[len(hidden) :]]
        assert kept == [[value.encode()] for value in passed]
        assert all(request.values(b"x-a") == [b"1"] for request in worker.arrived)
        two = [("authorization", f"Bearer {ADMIN}"), ("authorization", "Bearer theirs")]
        await running.client.get("/generate", headers=two)
        assert worker.arrived[-1].values(b"authorization") == [b"Bearer theirs"]


@pytest.mark.parametrize("header", ["x-api-key", "api-key", "cookie"])
async def test_the_routers_keys_reach_no_worker_in_another_header(start: Start, header: str) -> None:
    async with guarded(start, *BARE, "--admin-api-key", ADMIN) as (running, worker):
        hidden = [ADMIN, f"a=b; key={ADMIN}; c=d", f'key="{ADMIN}"', f"{ADMIN};c=d"]
        passed = ["theirs", "a=b; c=d", f"{ADMIN}x"]
        for value in (*hidden, *passed):
            reply = await running.client.get("/generate", headers={header: value})
            assert reply.status_code == 200, value
            assert (await running.client.get("/workers", headers={header: value})).status_code == 401
        arrived = [request.values(header.encode()) for request in worker.arrived]
        assert arrived == [*([[]] * len(hidden)), *([value.encode()] for value in passed)]


@pytest.mark.parametrize(
    "key", ["", " ", "the-secret ", " the-secret", "the\nsecret", "the-sécret", 7, ["the-secret"]]
)
async def test_a_workers_key_that_no_header_can_carry_is_refused_and_not_told(
    key: object, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(start) as (running, worker):
        for path in ("/workers", "/add_worker"):
            reply = await running.client.post(path, json={"url": worker.url, "api_key": key})
            assert reply.status_code == 400
            assert "api_key: wanted" in reply.text
            assert "secret" not in reply.text + caplog.text


class Looking:
    """slime's kind of middleware, which keeps the headers that it sees."""

    seen: list[tuple[bytes, bytes]]

    def __init__(self, app: object, *, router: Router) -> None:
        self.app = app
        Looking.seen = []

    async def __call__(self, scope: dict[str, object], receive: object, send: object) -> None:
        if scope["type"] == "http":
            Looking.seen += scope["headers"]  # type: ignore[arg-type]  # of a scope
        await self.app(scope, receive, send)  # type: ignore[operator]  # an application


async def test_middleware_sees_neither_a_key_nor_a_request_without_one(start: Start) -> None:
    async with guarded(start, *BOTH, "--middleware-paths", f"{__name__}:Looking") as (running, _):
        assert await status(running, "POST /generate") == 401
        assert Looking.seen == []
        assert await status(running, "POST /generate", TRAFFIC) == 200
        assert (b"host", b"localhost") in Looking.seen
        assert not [value for name, value in Looking.seen if name == b"authorization"]


async def test_no_key_is_told_by_what_holds_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(start, *BOTH) as (running, worker):
        router = running.router
        for text in (
            repr(router.settings),
            repr(router.options),
            repr(router.args),
            repr(vars(router.options)),
        ):
            assert "api_key" in text
            assert TRAFFIC not in text
            assert ADMIN not in text
        admin = {"authorization": f"Bearer {ADMIN}"}
        body = {"url": worker.url, "api_key": "workers-own-key"}
        shown = [await running.client.post("/workers", json=body, headers=admin)]
        for path in ("/workers", f"/workers/{worker.url}", "/list_workers"):
            shown.append(await running.client.get(path, headers=admin))
        for reply in shown:
            assert reply.is_success
            assert "workers-own-key" not in reply.text
        assert "workers-own-key" not in repr(list(router.pool))
    for key in (TRAFFIC, ADMIN, "workers-own-key"):
        assert key not in caplog.text


async def test_a_worker_gets_the_key_that_it_was_registered_with(start: Start) -> None:
    looks: list[list[bytes]] = []

    async def strict(wire: Wire) -> None:
        while request := await wire.head():
            key = request.values(b"authorization")
            looks.append(key)
            await wire.send(answer(b"{}", status=b"200 OK" if key else b"401 Unauthorized"))

    async with (
        scripted(strict) as worker,
        start(*BARE, "--api-key", TRAFFIC) as running,
    ):
        us = {"authorization": f"Bearer {TRAFFIC}"}
        for key in ("first", "second"):  # the second one while a connection is there
            added = await running.client.post(
                "/workers", json={"url": worker.url, "api_key": key}, headers=us
            )
            assert added.status_code == 202
            assert (await running.client.post("/generate", content=b"", headers=us)).status_code == 200
            assert looks[-1] == [b"Bearer " + key.encode()]
        again = await running.client.post("/workers", json={"url": worker.url}, headers=us)
        assert again.status_code == 202
        assert (await running.client.get("/generate", headers=us)).status_code == 200
        assert looks[-1] == [b"Bearer second"]


async def test_workers_that_are_registered_without_a_key_have_a_common_one(start: Start) -> None:
    flags = (*BARE, *BOTH, "--worker-api-key", "common")
    async with guarded(start, *flags) as (running, worker):
        for registered, key in (({}, "common"), ({"api_key": "own"}, "own"), ({}, "own")):
            added = await running.client.post(
                "/workers",
                json={"url": worker.url, **registered},
                headers={"authorization": f"Bearer {ADMIN}"},
            )
            assert added.status_code == 202
            assert await status(running, "POST /generate", TRAFFIC) == 200
            assert worker.arrived[-1].values(b"authorization") == [f"Bearer {key}".encode()]


async def test_a_clients_own_key_goes_before_the_workers(start: Start) -> None:
    async with guarded(start, *BARE) as (running, worker):
        await running.client.post("/workers", json={"url": worker.url, "api_key": "ours"})
        await running.client.get("/a", headers={"authorization": "Bearer theirs"})
        await running.client.get("/b")
        # Named as a header of this hop it is none of the worker's, and the worker's own stands in.
        await running.client.get("/c", headers={"authorization": "x", "connection": "authorization"})
        given = [request.values(b"authorization") for request in worker.arrived]
        assert given == [[b"Bearer theirs"], [b"Bearer ours"], [b"Bearer ours"]]


async def test_requests_of_the_core_to_workers_show_the_key(start: Start) -> None:
    worker = Recording()
    asked: list[tuple[str, str | None]] = []

    async def strict(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked.append((scope["path"], Request(scope).headers.get("authorization")))
        await worker(scope, receive, send)

    async with serving(strict) as url, start(*BARE) as running:
        added = await running.client.post("/workers", json={"url": url, "api_key": "ours"})
        assert "warning" not in added.json()
    assert asked == [("/model_info", "Bearer ours")]
    assert auth_headers(Worker("http://10.0.0.1")) == {}


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ключ", "a\x7f"])
@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key", "--worker-api-key"])
def test_a_key_that_cannot_be_is_refused_untold(
    flag: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([flag, key]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"slime-router: {flag}: wanted a key of visible ASCII characters")
    assert told.count("\n") == 1
    assert not key.strip() or key not in told
    monkeypatch.setenv(f"SLIME_ROUTER_{flag[2:].upper().replace('-', '_')}", key)
    with pytest.raises(SettingsError, match="wanted a key"):
        build([])


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ROUTER_API_KEY", "-a=b[c]")
    monkeypatch.setenv("SLIME_ROUTER_ADMIN_API_KEY", "[x,y]")
    options = build([])[0].options
    assert (options.api_key, options.admin_api_key) == ("-a=b[c]", "[x,y]")


def test_the_value_of_a_misspelt_flag_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--api-kye={TRAFFIC}"]) == 2
    assert main(["--api-kye", TRAFFIC]) == 2
    assert TRAFFIC not in capsys.readouterr().err


def test_both_keys_are_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def watched(token: bytes, key: bytes) -> bool:
        compared.append(key)
        return real(token, key)

    monkeypatch.setattr("slime_auth.access.hmac.compare_digest", watched)
    keys = Keys(Secret(TRAFFIC), Secret(ADMIN))
    for shown, level in ((TRAFFIC, Level.TRAFFIC), (ADMIN, Level.ADMIN), ("wrong", Level.OPEN)):
        compared.clear()
        assert keys.authenticate([(b"authorization", b"Bearer " + shown.encode())])[0].level is level
        assert compared[:2] == [TRAFFIC.encode(), ADMIN.encode()]


@pytest.mark.parametrize("key", ["the-key", "a,b", "a=b==", '"quoted"', ":;", "{a}/b", "%41+~"])
def test_a_key_of_any_characters_is_removed_wherever_it_stands(key: str) -> None:
    keys = Keys(Secret(key), Secret("another"))
    for before in (
        "",
        "x ",
        "Bearer ",
        "Bearer\t",
        "Digest k=",
        'Digest k="',
        "k==",
        "x,",
        "x;",
        "x: ",
        "(",
        "`",
    ):
        for after in ("", " x", "\tx", '"', "'", ",x", ";", "=", ":x", ")", "`"):
            for name in (b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"):
                header = (name, (before + key + after).encode())
                assert keys.authenticate([header])[1] == [], header
    credentials = b64encode(f"user:{key}".encode())
    for encoded in (b"Basic " + credentials, b"x, BASIC  " + credentials + b" x"):
        assert keys.authenticate([(b"authorization", encoded)])[1] == []


def test_a_namespace_does_not_tell_its_secrets() -> None:
    assert repr(argparse.Namespace(api_key=Secret("abc"))) == "Namespace(api_key=Secret(...))"
