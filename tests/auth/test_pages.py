"""Requests of other sites' pages to a router without keys, and requests of programs."""

from __future__ import annotations

import pytest

from core.servers import Wire, answer, scripted
from routers import Start

pytestmark = pytest.mark.anyio

#: As browsers send them: a form or ``no-cors`` fetch, an image, a page of another port, a name that was rebound.
FORM = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
IMAGE = {"sec-fetch-site": "cross-site"}
NEIGHBOUR = {"sec-fetch-site": "same-site"}
REBOUND = {"host": "evil.example:30000"}
JSON = {"content-type": "application/json"}
REGISTRATION = b'{"url": "http://127.0.0.1:1"}'


async def echo(wire: Wire) -> None:
    while await wire.request():
        await wire.send(answer(b"{}"))


#: Method, path, headers, and the status of the answer.
REFUSED: list[tuple[str, str, dict[str, str], int]] = [
    ("POST", "/workers", FORM, 403),
    ("POST", "/workers", FORM | JSON, 403),
    ("POST", "/workers", {"content-type": "text/plain"}, 415),
    ("POST", "/workers", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("POST", "/workers", JSON | {"origin": "null"}, 403),
    ("POST", "/workers", JSON | NEIGHBOUR, 403),
    ("POST", "/workers", JSON | REBOUND, 403),
    ("POST", "/flush_cache", FORM, 403),
    ("GET", "/flush_cache", IMAGE, 403),
    ("GET", "/flush_cache", NEIGHBOUR, 403),
    ("GET", "/flush_cache", REBOUND, 403),
    ("GET", "/%66lush_cache", IMAGE, 403),
    ("GET", "/workers", REBOUND, 403),
    ("GET", "/generate", REBOUND, 403),
    ("GET", "/health", {"host": "localhost.evil.example"}, 403),
]
ANSWERED: list[tuple[str, str, dict[str, str]]] = [
    ("POST", "/workers", JSON),
    ("POST", "/workers", {"content-type": "application/json; charset=utf-8", "host": "localhost:30000"}),
    ("POST", "/workers", JSON | {"host": "[::1]:30000"}),
    ("POST", "/workers", JSON | {"host": "10.0.0.7:30000", "sec-fetch-site": "none"}),
    ("POST", "/workers", JSON | {"origin": "https://mine.example", "sec-fetch-site": "cross-site"}),
    ("POST", "/workers", JSON | {"host": "mine.example"}),
    ("POST", "/workers", {}),
    ("POST", "/flush_cache", {}),
    ("GET", "/flush_cache", {}),
    ("POST", "/generate", {"content-type": "text/plain"}),
    ("POST", "/generate", FORM),
]


async def test_a_page_can_neither_control_nor_read(start: Start) -> None:
    async with scripted(echo) as worker, start("--worker-urls", worker.url) as running:
        seen = len(worker.arrived)
        for method, path, headers, status in REFUSED:
            body = REGISTRATION if method == "POST" else None
            refused = await running.client.request(method, path, headers=headers, content=body)
            assert refused.status_code == status, (method, path, headers)
            kind = "permission_error" if status == 403 else "invalid_request_error"
            assert refused.json()["error"]["type"] == kind
        assert [one.url for one in running.router.pool] == [worker.url]
        asked = [one.line for one in worker.arrived[seen:]]
        assert all(b" /model_info " in line or b" /health " in line for line in asked)


@pytest.mark.parametrize("path", ["/genrate", "/workers"])
async def test_a_wrong_content_type_is_told_with_its_cure(start: Start, path: str) -> None:
    async with start() as running:
        refused = await running.client.post(path, headers={"content-type": "text/plain"}, content=b"{}")
        message = refused.json()["error"]["message"]
        assert message.startswith("wanted Content-Type: application/json, got text/plain")
        assert f"POST {path} is a control call or an unknown path" in message
        assert "-H 'Content-Type: application/json'" in message


@pytest.mark.parametrize("path", ["/retrieve_from_text", "/retrieve_from_messages_template"])
async def test_retrieval_without_its_plugin_names_the_plugin(start: Start, path: str) -> None:
    async with start() as running:
        kind = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d
        answered = await running.client.post(path, headers=kind, content=b'{"text": "a"}')
        assert answered.status_code == 501
        assert "--plugin radix_cache" in answered.json()["error"]["message"]


async def test_programs_and_sites_that_were_named_can(start: Start) -> None:
    flags = ("--cors-allowed-origins", "https://mine.example")
    async with scripted(echo) as worker, start("--worker-urls", worker.url, *flags) as running:
        for method, path, headers in ANSWERED:
            body = b'{"url": "%b"}' % worker.url.encode() if path == "/workers" else b""
            answered = await running.client.request(method, path, headers=headers, content=body)
            assert answered.status_code < 300, (method, path, headers, answered.text)


async def test_where_keys_are_needed_they_are_enough(start: Start) -> None:
    async with scripted(echo) as worker, start("--worker-urls", worker.url, "--api-key", "k") as running:
        headers = FORM | REBOUND | {"authorization": "Bearer k"}
        assert (await running.client.get("/workers", headers=headers)).status_code == 200
        assert (await running.client.get("/workers", headers=FORM | REBOUND)).status_code == 401


async def test_the_names_of_a_router_for_others_are_not_known(start: Start) -> None:
    async with scripted(echo) as worker, start("--worker-urls", worker.url, "--host", "0.0.0.0") as running:
        address = running.url.replace("0.0.0.0", "127.0.0.1")
        named = await running.client.get(f"{address}/workers", headers={"host": "router.internal:30000"})
        assert named.status_code == 200
        assert (await running.client.post(f"{address}/flush_cache", headers=FORM)).status_code == 403
