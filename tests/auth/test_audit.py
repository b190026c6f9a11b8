"""``--control-plane-audit-enabled``: a line for each control call, that says who, what and how it ended."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import anyio
import pytest

from core.servers import Wire, answer, dial, scripted, talk
from plugged import until
from routers import BARE, Start
from slime_auth import Settings

pytestmark = pytest.mark.anyio

KEYS = (
    *("--api-key", "traffic-key", "--admin-api-key", "admin-key"),
    *("--control-plane-api-keys", "ops:Ops:admin:ops-key", "bob:Bob:user:bobs-key"),
)
AUDIT = "--control-plane-audit-enabled"
FIELDS = ("principal", "auth_method", "role", "method", "path", "outcome", "status")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    said = [record.getMessage() for record in caplog.records if record.name == "slime_auth.audit"]
    assert all(line.isascii() and line.isprintable() for line in said)
    return [json.loads(line.removeprefix("control_plane_audit ")) for line in said]


def told(line: dict[str, Any]) -> tuple[Any, ...]:
    assert set(line) - {"details"} == set(FIELDS)
    return tuple(line[field] for field in FIELDS)


async def worker(wire: Wire) -> None:
    while request := await wire.request():
        if b"/vanish" in request.line:
            return
        failed = b"/fail" in request.line
        await wire.send(answer(b"{}", status=b"400 Bad Request" if failed else b"200 OK"))


async def test_each_control_call_has_its_line_and_nothing_else_has_one(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls: list[tuple[str, str, str | None, tuple[Any, ...]]] = [
        ("GET", "/workers", "ops-key", ("ops", "api_key", "admin", "GET", "/workers", "success", 200)),
        (
            "GET",
            "/workers",
            "admin-key",
            ("--admin-api-key", "api_key", "admin", "GET", "/workers", "success", 200),
        ),
        ("GET", "/workers", "bobs-key", ("bob", "api_key", "user", "GET", "/workers", "denied", 403)),
        (
            "GET",
            "/workers",
            "traffic-key",
            ("--api-key", "api_key", "user", "GET", "/workers", "denied", 403),
        ),
        ("GET", "/workers", "guessed-key", (None, "none", None, "GET", "/workers", "denied", 401)),
        ("POST", "/flush_cache", None, (None, "none", None, "POST", "/flush_cache", "denied", 401)),
        (
            "POST",
            "/configure?key=secret",
            "ops-key",
            ("ops", "api_key", "admin", "POST", "/configure", "success", 200),
        ),
        ("POST", "/fail", "ops-key", ("ops", "api_key", "admin", "POST", "/fail", "failed", 400)),
        ("POST", "/vanish", "ops-key", ("ops", "api_key", "admin", "POST", "/vanish", "failed", 502)),
        (
            "DELETE",
            "/workers/x",
            "ops-key",
            ("ops", "api_key", "admin", "DELETE", "/workers/x", "failed", 404),
        ),
    ]
    async with (
        scripted(worker) as served,
        start(*BARE, *KEYS, AUDIT, "--worker-urls", served.url) as running,
    ):
        for method, path, key, expected in calls:
            shown = {} if key is None else {"authorization": f"Bearer {key}"}
            reply = await running.client.request(method, path, headers=shown, content=b"a secret body")
            assert reply.status_code == expected[-1]
            for line in ("/generate", "/health", "/v1/models"):
                await running.client.get(line, headers=shown)
    found = lines(caplog)
    assert [told(line) for line in found] == [expected for *_, expected in calls]
    assert [line for line in found if ("details" in line) != (line["outcome"] == "denied")] == []
    for secret in ("secret", "guessed-key", "traffic-key", "admin-key", "ops-key", "bobs-key"):
        assert secret not in json.dumps(found)


async def test_a_client_that_hangs_up_has_its_line_too(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    arrived = anyio.Event()

    async def patient(wire: Wire) -> None:
        if await wire.request():
            arrived.set()
            await wire.until_closed()

    async with (
        scripted(patient) as served,
        start(*BARE, *KEYS, AUDIT, "--worker-urls", served.url) as running,
    ):
        with await dial(running.url) as raw:
            head = b"POST /slow HTTP/1.1\r\nHost: [::]\r\nAuthorization: Bearer ops-key\r\nContent-Length: 0\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(raw, head)
            await arrived.wait()
        await until(lambda: bool(lines(caplog)))
    assert [told(line) for line in lines(caplog)] == [
        ("ops", "api_key", "admin", "POST", "/slow", "failed", None)
    ]


async def test_callers_cannot_forge_lines(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with start(*BARE, *KEYS, AUDIT) as running:
        for path in (
            "/a%0acontrol_plane_audit%20{}",
            '/"},"outcome":"success"',
            "/%85%ff",
            f"/{'a' * 5000}",
        ):
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            await talk(running.url, request.encode("latin-1"))
    said = lines(caplog)
    assert [line["outcome"] for line in said] == ["denied"] * 4
    assert said[0]["path"] == "/a%0acontrol_plane_audit%20{}"
    assert said[1]["path"] == '/"},"outcome":"success"'
    assert said[3]["path"] == f"/{'a' * 1023}"


async def test_without_keys_it_is_written_down_that_anybody_asked(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start(*BARE, AUDIT) as running:
        assert Settings.from_options(running.router.options).locked is False
        assert (await running.client.get("/workers")).status_code == 200
    assert [told(line) for line in lines(caplog)] == [(None, "none", None, "GET", "/workers", "success", 200)]


async def test_without_the_flag_nothing_is_written_down(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start(*BARE, *KEYS) as running:
        await running.client.get("/workers", headers={"authorization": "Bearer ops-key"})
    assert lines(caplog) == []
