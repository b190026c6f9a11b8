"""Requests and replies that a plugin breaks: the plugin and the hook are named, where it happened."""

from __future__ import annotations

from typing import Any

import pytest

from plugged import Recording, routing
from router_core import Exchange, Reply, hookimpl

pytestmark = pytest.mark.anyio

BAD_HEADERS: dict[str, Any] = {
    "a header as str": [("x-team", "blue")],
    "a value as str": [(b"x-team", "blue")],
    "a number": [(b"x-tokens", 7)],
    "no pair": [b"x-team: blue"],
    "a dict": {b"x-team": b"blue"},
    "a line break": [(b"x-team", b"blue\r\nx-admin: 1")],
    "nothing": None,
}


class Innocent:
    """Changes headers before and after the plugin that breaks them, as it may."""

    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        exchange.request.headers = [*exchange.request.headers, (b"x-seen", b"1")]

    @hookimpl
    def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.headers.append((b"x-seen", b"1"))


class Before:
    def __init__(self, headers: Any) -> None:
        self._headers = headers

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        if isinstance(self._headers, list):
            exchange.request.headers.extend(self._headers)
        else:
            exchange.request.headers = self._headers


class After:
    def __init__(self, headers: Any) -> None:
        self._headers = headers

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.headers = self._headers


class Answers(Before):
    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply:  # type: ignore[override]
        return Reply(200, self._headers, b"done")


class Retargets:
    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        exchange.request.target = "/other"  # type: ignore[assignment]  # the mistake


@pytest.mark.parametrize("mistake", BAD_HEADERS)
@pytest.mark.parametrize(
    ("kind", "hook"), [(Before, "pre_request"), (Answers, "pre_request"), (After, "post_response")]
)
async def test_headers_that_cannot_be_sent_name_the_plugin_and_the_hook(
    mistake: str, kind: Any, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Recording()
    plugins = {"first": Innocent(), "odd": kind(BAD_HEADERS[mistake]), "last": Innocent()}
    async with routing(plugins, worker) as running:
        answer = await running.client.post("/x", content=b"hello")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "PLUGIN_FAILED"
    assert answer.json()["error"]["message"].startswith(f"plugin 'odd' failed in {hook}; ")
    assert "wanted a list of pairs of bytes, without line breaks" in caplog.text
    assert "blue" not in caplog.text  # a header may be a secret
    assert worker.bodies == ([b"hello"] if kind is After else [])


async def test_a_target_that_is_no_bytes_names_the_plugin() -> None:
    async with routing({"odd": Retargets(), "last": Innocent()}, Recording()) as running:
        answer = await running.client.get("/x")
    assert answer.json()["error"]["message"].startswith("plugin 'odd' failed in pre_request; ")


async def test_headers_that_can_be_sent_are_sent() -> None:
    worker = Recording()
    good = [(b"x-team", b"blue")]
    async with routing(
        {"first": Innocent(), "before": Before(good), "after": After(good)}, worker
    ) as running:
        answer = await running.client.get("/x")
    assert (answer.headers["x-team"], answer.headers["x-seen"]) == ("blue", "1")
    ((_, sent, _),) = worker.requests
    assert (sent["x-team"], sent["x-seen"]) == ("blue", "1")
