"""Answers and logs say what is wrong, and nothing else: no key, no body, no token, no traceback, no path of a file."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.servers import Wire, answer, scripted, talk
from router_core import Exchange, hookimpl
from router_core.admin import admin_routes
from router_core.cli import build
from router_core.logs import start_logging
from router_core.router import Router
from router_core.settings import Settings
from routers import BARE, Start
from slime_http.serving import serving

pytestmark = pytest.mark.anyio

TRAFFIC, ADMIN, WORKERS = "traffic-key-0123456789", "admin-key-0123456789", "workers-key-0123456789"
#: In the headers of requests; and in bodies, further back than what an error quotes of a wrong value.
IN_HEADERS, IN_BODIES = "MARKED-HEADER-31415", "MARKED-BODY-27182"
LONG = "a" * 300 + IN_BODIES
PLUGINS = ("engine", "radix_cache", "openai", "r3")
EVERYTHING = (
    "--api-key",
    TRAFFIC,
    "--admin-api-key",
    ADMIN,
    *(part for name in PLUGINS for part in ("--plugin", name)),
)

#: Paths of Python, and of code of ours and others.
_INNARDS = re.compile(r'Traceback|File "|\.py\b|site-packages|/router_core/|/plugins/slime_|0x[0-9a-f]{8,}')

MESSAGES = [{"role": "user", "content": LONG}]
BODIES: list[Any] = [
    *(
        {},
        [],
        LONG,
        None,
        7,
        {LONG: LONG},
        [LONG],
        {"url": LONG},
        {"weight_version": LONG},
        {"text": [[LONG]]},
    ),
    *(
        {"text": LONG},
        {"text": LONG, "sampling_params": LONG},
        {"text": LONG, "sampling_params": {"n": LONG}},
    ),
    *({"text": {"a": LONG}}, {"input_ids": [LONG]}, {"input_ids": LONG}, {"text": LONG, "rid": [LONG]}),
    *({"messages": LONG}, {"messages": [LONG]}, {"messages": [{"role": LONG, "content": LONG}]}),
    *({"messages": [{"role": "user", "content": {"a": LONG}}]}, {"messages": MESSAGES, "n": LONG}),
    *(
        {"messages": MESSAGES, "max_tokens": LONG},
        {"messages": MESSAGES, "tools": [LONG]},
        {"messages": MESSAGES, LONG: 1},
    ),
    *({"messages": MESSAGES, "max_tokens": 1}, {"prompt": LONG, "max_tokens": 1}, {"prompt": {"a": LONG}}),
    *(
        {"prompt": LONG, "stop": [[LONG]]},
        {"url": "http://127.0.0.1:1", "labels": LONG},
        {"session_id": LONG},
    ),
    *(
        {"url": "http://127.0.0.1:1", "labels": {"a": [LONG]}, "api_key": WORKERS},
        {"rid": LONG},
        {"model_path": LONG},
    ),
    {"url": "http://127.0.0.1:1", "api_key": [WORKERS]},
]
RAW = [
    *(b"", b"{", b'{"text": "' + LONG.encode(), LONG.encode(), b"\xff" + LONG.encode(), b"\0" * 9 + LONG.encode()),
    *(b"[" * 9000 + LONG.encode(), b'{"text": "\xff' + LONG.encode() + b'"}'),
    b'{"text": "\\ud800' + LONG.encode() + b'"}',
]  # fmt: skip
#: Beside the routes: what goes to a worker, to all of them, or nowhere.
PROXIED = ("/generate", "/flush_cache", "/abort_request", "/update_weights_from_disk", "/pause_generation",
           "/continue_generation", "/nowhere", "/tokenize", "/v1/embeddings", "/%00%ff", "/workers/%0a")  # fmt: skip


def paths(router: Router) -> Iterator[str]:
    """All routes of the router's own, with something in their parameters."""
    for route in (
        *admin_routes(router),
        *(each for _, routes in router.hooks.routes for each in routes(router)),
    ):
        yield re.sub(r"{[^}]*}", "x", route.path)
    yield from PROXIED


def headers(key: str) -> list[tuple[str, str]]:
    marked = (
        "x-session-id",
        "x-smg-routing-key",
        "cookie",
        "user-agent",
        "x-api-key",
        "accept",
        "content-type",
    )
    return [("authorization", f"Bearer {key}"), *((name, f"{IN_HEADERS}/x") for name in marked)]


def told(records: list[logging.LogRecord]) -> str:
    """All that a log would have, tracebacks too."""
    formatter = logging.Formatter("%(levelname)s %(name)s %(message)s")
    return "\n".join(formatter.format(record) for record in records if record.levelno >= logging.INFO)


def says_only_what_is_wrong(reply: httpx.Response, what: str, *, ours: bool = True) -> None:
    """``ours``: a worker's own words about a request are passed on as they are."""
    everything = f"{reply.text}\n{reply.headers}"
    for secret in (TRAFFIC, ADMIN, WORKERS, IN_HEADERS):
        assert secret not in everything, what
    assert _INNARDS.search(everything) is None, f"{what}: {everything}"
    if reply.is_error and ours:
        assert IN_BODIES not in reply.text, f"{what}: {reply.text[:2000]}"
        assert len(reply.text) < 3000, what


async def test_odd_requests_to_every_route_bring_nothing_out(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start(*EVERYTHING, "--control-timeout-s", "2") as running:
        asked = 0
        for path in dict.fromkeys(paths(running.router)):
            for key in (ADMIN, TRAFFIC, f"wrong-{IN_HEADERS}"):
                contents = (
                    [*RAW, *(json.dumps(body).encode() for body in BODIES)] if key is ADMIN else RAW[:3]
                )
                for content in contents:
                    for method in ("POST", "GET", "DELETE", "PUT") if content == b"{" else ("POST",):
                        reply = await running.client.request(
                            method, path, content=content, headers=headers(key)
                        )
                        what = f"{method} {path} {content[:60]!r}"
                        says_only_what_is_wrong(reply, what, ours=path not in PROXIED)
                        asked += 1
                    if method == "POST" and reply.status_code == 405 and content is RAW[-1]:
                        break  # no body is read there
            await running.client.post("/continue_generation", json={}, headers=headers(ADMIN))
        assert asked > 500
    log = told(caplog.records)
    for secret in (TRAFFIC, ADMIN, WORKERS, IN_HEADERS, IN_BODIES):
        assert secret not in log, next(line for line in log.splitlines() if secret in line)[:2000]


async def test_a_worker_that_breaks_brings_no_request_into_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Each in another way; the answers are the router's own then."""
    caplog.set_level(logging.INFO)
    endings = iter(
        (b"", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"SSH-2.0\r\n", answer(b"[")[:-1], b"\0" * 99)
    )

    async def breaking(wire: Wire) -> None:
        if await wire.request():
            await wire.send(next(endings))

    async with scripted(breaking) as worker, start(*BARE, "--api-key", TRAFFIC) as running:
        add = {"url": worker.url, "api_key": WORKERS}
        await running.client.post("/workers", json=add, headers=headers(TRAFFIC))
        for number in range(5):
            try:
                reply = await running.client.post("/generate", json={"text": LONG}, headers=headers(TRAFFIC))
            except httpx.RemoteProtocolError:
                continue  # the answer broke off
            assert reply.status_code == 502, number
            says_only_what_is_wrong(reply, str(number))
    log = told(caplog.records)
    assert "WARNING router_core.app POST /generate: 502" in log
    for secret in (TRAFFIC, WORKERS, IN_HEADERS, IN_BODIES):
        assert secret not in log


class TellingPlugin:
    """Raises in the hook whose name the request has as its path, with a secret as the message."""

    def _fail(self, place: str, path: str) -> None:
        if path == f"/{place}":
            raise RuntimeError("a secret of the plugin")

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        self._fail("pre_request", exchange.request.path)

    @hookimpl
    def select_worker(self, exchange: Exchange) -> None:
        self._fail("select_worker", exchange.request.path)

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        self._fail("post_response", exchange.request.path)

    @hookimpl
    def routes(self, router: Router) -> list[Route]:
        async def fail(request: Request) -> Response:
            raise RuntimeError("a secret of the plugin")

        return [Route("/routes", fail)]


class FragileMiddleware:
    """slime's kind of middleware; raises for one path."""

    def __init__(self, app: Any, *, router: Router) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/middleware":
            raise RuntimeError("a secret of the plugin")
        await self.app(scope, receive, send)


def make_plugin(_: argparse.Namespace) -> TellingPlugin:
    return TellingPlugin()


async def test_exceptions_of_plugins_stay_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def echo(wire: Wire) -> None:
        while await wire.request():
            await wire.send(answer(b"fine"))

    failing = ("--middleware-paths", f"{__name__}:make_plugin", f"{__name__}:FragileMiddleware")
    async with (
        scripted(echo) as worker,
        start(*BARE, *failing, "--worker-urls", worker.url) as running,
    ):
        assert (await running.client.get("/")).text == "fine"
        for path in ("/pre_request", "/select_worker", "/post_response", "/routes", "/middleware"):
            reply = await running.client.get(path)
            assert reply.status_code == 500, path
            says_only_what_is_wrong(reply, path)
            assert "a secret" not in reply.text
    assert told(caplog.records).count("RuntimeError: a secret of the plugin") >= 5


def test_clients_cannot_forge_lines_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root", logging.INFO)
    monkeypatch.setattr(logging, "root", root)
    start_logging(Settings())
    try:
        raise ValueError("why")
    except ValueError:
        root.exception("version %s", "7\n2026-01-01 ERROR x: forged\r\x1b[2J\x85\u2028end")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(r"ERROR root: version 7\n2026-01-01 ERROR x: forged\r\x1b[2J\x85\u2028end")
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", "  ValueError: why")


async def test_an_encoded_line_break_is_told_encoded(caplog: pytest.LogCaptureFixture) -> None:
    _, app = build([*BARE])
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/a%0aERROR%20forged")).status_code == 503
    assert "GET /a%0aERROR%20forged: 503" in caplog.text


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


@pytest.mark.parametrize("space", [" ", "\t", " \t \t"])
async def test_a_header_with_white_space_around_it_is_passed_on_and_not_told(
    space: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted(echo) as worker, start("--worker-urls", worker.url) as running:
        head = (
            f"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {IN_HEADERS}{space}\r\n"
        )
        reply = await talk(running.url, f"{head}X-Empty:{space}\r\nConnection: close\r\n\r\n".encode())
        assert reply.startswith(b"HTTP/1.1 200 ")
        flushed = next(request for request in worker.arrived if b"/flush_cache" in request.line)
        assert flushed.values(b"authorization") == [f"Bearer {IN_HEADERS}".encode()]
        assert flushed.values(b"x-empty") == [b""]
    assert IN_HEADERS not in caplog.text + reply.decode()
