"""``GET /openapi.json`` describes the routes of the plugins that are loaded."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from routers import BARE, Start
from wheels import ROOT

OPENAPI = (*BARE, "--plugin", "openapi")


async def fetched(start: Start, *arguments: str) -> dict[str, Any]:
    async with start(*arguments) as running:
        answer = await running.client.get("/openapi.json")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert (await running.client.get("/openapi.json")).content == answer.content
        document: dict[str, Any] = answer.json()
    return document


@pytest.mark.anyio
async def test_all_plugins_give_the_whole_description(start: Start) -> None:
    yaml = pytest.importorskip("yaml")
    named = ("radix_cache", "openai", "control", "sessions", "metrics")
    plugins = [part for name in ("engine", *named) for part in ("--plugin", name)]
    document = await fetched(start, *OPENAPI, *plugins)
    written = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text(encoding="utf-8"))
    assert document["info"].pop("version") == version("slime-router")
    assert document.pop("servers") == [{"url": "/"}]
    del written["info"]["version"], written["servers"]
    assert document == written


@pytest.mark.anyio
async def test_operations_of_missing_plugins_are_left_out(start: Start) -> None:
    document = await fetched(start, *OPENAPI)
    assert {tag["name"] for tag in document["tags"]} == {"workers", "router"}
    left = {"/health", "/liveness", "/readiness", "/weight_version", "/openapi.json"}
    workers = {"/add_worker", "/remove_worker", "/list_workers", "/workers", "/workers/{worker_id}"}
    assert document["paths"].keys() == left | workers


@pytest.mark.anyio
async def test_without_the_plugin_a_worker_is_asked(start: Start) -> None:
    async with start(*BARE) as running:
        answer = await running.client.get("/openapi.json")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "NO_WORKER"
