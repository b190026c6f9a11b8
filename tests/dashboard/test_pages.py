"""Pages and their data over HTTP: addresses, keys and headers."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from routers import BARE, Start
from slime_dashboard.pages import PAGES

pytestmark = pytest.mark.anyio

DASHBOARD = (*BARE, "--plugin", "dashboard")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_each_page_loads_only_what_the_router_serves(start: Start) -> None:
    async with start(*DASHBOARD, "--api-key", "t", "--admin-api-key", "a") as running:
        for page in PAGES:
            address = running.client.base_url.join("/ui" if page is PAGES[0] else f"/ui/{page.name}")
            answer = await running.client.get(address)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
            assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=| style=", answer.text)
            links = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
            assert len(links) >= 6
            for link in links:
                loaded = await running.client.get(address.join(link))
                assert loaded.status_code == 200, link
                assert address.join(link).host == address.host


async def test_pages_work_below_a_path_of_a_proxy(start: Start) -> None:
    async with start(*DASHBOARD, "--dashboard-path", "/a/b") as running:
        page = await running.client.get("/a/b")
        outside = httpx.URL("https://outside.example/router/a/b")
        for link in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
            assert outside.join(link).path.startswith("/router/a/b")
        slash = await running.client.get("/a/b/")
        assert slash.status_code == 307
        assert outside.join("b/").join(slash.headers["location"]) == outside


async def test_data_need_the_key_that_workers_need(start: Start) -> None:
    async with start(*DASHBOARD, "--api-key", "t", "--admin-api-key", "a") as running:
        for headers, status in (({}, 401), (bearer("t"), 403), (bearer("a"), 200)):
            for path in ("/workers", "/ui/data/overview"):
                answer = await running.client.get(path, headers=headers)
                assert answer.status_code == status, path
            assert (await running.client.get("/ui", headers=headers)).status_code == 200
        data = await running.client.get("/ui/data/overview", headers=bearer("a"))
        assert data.headers["cache-control"] == "no-store"


async def test_only_reading_a_page_needs_no_key(start: Start) -> None:
    async with start(*DASHBOARD, "--api-key", "t", "--admin-api-key", "a") as running:
        assert (await running.client.head("/ui")).status_code == 200
        assert (await running.client.post("/ui")).status_code == 401
        for path in ("/ui/other", "/ui/static/other.js", "/ui/static/../../workers", "/uii", "/ui/data"):
            assert (await running.client.get(path)).status_code == 401, path


async def test_browsers_keep_files_and_ask_again(start: Start) -> None:
    async with start(*DASHBOARD) as running:
        first = await running.client.get("/ui/static/uPlot.iife.min.js")
        assert len(first.content) > 40_000
        again = await running.client.get(
            "/ui/static/uPlot.iife.min.js", headers={"if-none-match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        missing = await running.client.get("/ui/static/uPlot.LICENSE")
        assert missing.status_code == 404


async def test_no_dashboard_leaves_the_path_to_workers(start: Start) -> None:
    async with start(*DASHBOARD, "--no-dashboard") as running:
        answer = await running.client.get("/ui")
        assert answer.status_code == 503  # there is no worker
        assert answer.json()["error"]["code"] == "NO_WORKER"


@pytest.mark.parametrize("path", ["", "ui", "/", "/ui/", "/a//b", "/{x}", "/ui\n", "/../ui"])
async def test_path_that_cannot_be_one_is_refused(path: str, start: Start) -> None:
    with pytest.raises(Exception, match="--dashboard-path: wanted a path such as /ui, got"):
        async with start(*DASHBOARD, "--dashboard-path", path):
            pass


def test_the_library_has_its_licence_and_version_beside_it() -> None:
    static = files("slime_dashboard") / "static"
    numbers = re.findall(r"\d+\.\d+\.\d+", (static / "uPlot.VERSION").read_text())
    assert numbers
    assert f"(v{numbers[0]})" in (static / "uPlot.iife.min.js").read_text()[:100]
    assert "MIT License" in (static / "uPlot.LICENSE").read_text()
