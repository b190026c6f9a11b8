"""The first page in a real browser."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dashboard.browser import Browser
from router_core.router import Router
from routers import BARE, Start
from slime_dashboard.history import Sample
from slime_dashboard.overview import Overview
from slime_testing import Running

pytestmark = pytest.mark.anyio

WITH_TOKENS = ("--plugin", "engine", "--engine-workers", "2", "--plugin", "radix_cache")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202egnp.exe"
#: Numbers of tables and legends that take more than one line.
TORN = """
const lines = (cell) => { const all = new Range(); all.selectNodeContents(cell); return all.getClientRects().length; };
const cells = [...document.querySelectorAll(".legend td, #exactness td.number")];
return cells.filter((cell) => lines(cell) > 1).map((cell) => cell.innerText);
"""
#: Makes the page poll twenty times a second, and counts its data requests.
QUICK = """
const slow = window.setTimeout;
window.setTimeout = (task, delay, ...more) => slow(task, delay === 5000 ? 50 : delay, ...more);
window.asked = [];
const ask = window.fetch;
window.fetch = (url, ...more) => { window.asked.push(String(url)); return ask(url, ...more); };
"""


@pytest.fixture
def anyio_backend() -> str:
    """A usual loop: the browser lives in real time."""
    return "asyncio"


async def generate(running: Running, session: str, text: str = "Hi") -> str:
    body = {"text": text, "session_id": session, "sampling_params": {"max_new_tokens": 4}}
    answer = await running.client.post("/generate", json=body)
    assert answer.status_code == 200
    return text + str(answer.json()["text"])


@asynccontextmanager
async def quick(browser: Browser) -> Any:
    """Pages that are opened within poll quickly."""
    add, remove = "Page.addScriptToEvaluateOnNewDocument", "Page.removeScriptToEvaluateOnNewDocument"
    added = await browser.run(browser.driver.execute_cdp_cmd, add, {"source": QUICK})
    try:
        yield
    finally:
        await browser.run(browser.driver.execute_cdp_cmd, remove, added)


async def test_page_shows_data_without_a_key_if_none_is_set(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        text = await generate(running, "rollout-1")
        await running.client.post("/retrieve_from_text", json={"text": text})
        await chromium.open(f"{running.url}/ui")
        assert await chromium.until_text("#status", "2 of 2 workers ready")
        workers = await chromium.until_text("#workers", "ready")
        for worker in running.router.pool:
            assert worker.url in workers
        assert "rollout-1" in await chromium.until_text("#sessions", "rollout-1")
        exactness = await chromium.text("#exactness")
        assert exactness.index("Sampled answers") < exactness.index("exact") < exactness.index("Retrieved")
        loaded = await chromium.js("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert len(loaded) > 8
        assert [url for url in loaded if not url.startswith(running.url)] == []
        assert not await chromium.js("return document.getElementById('forget').checkVisibility()")
        assert await chromium.problems() == []


async def test_share_of_known_tokens_counts_ids_that_clients_give(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        for _ in range(2):
            await running.client.post("/generate", json={"input_ids": [72, 105, 33]})
        stats = (await running.client.get("/cache_stats")).json()
        await chromium.open(f"{running.url}/ui")
        cache = await chromium.until_text("#cache", "taken from records")
    assert (stats["tokens_reused"], stats["tokens_encoded"], stats["tokens_given"]) == (3, 0, 3)
    assert "50" in cache.partition("taken from records")[2].partition("Prompts")[0]


async def test_page_asks_for_the_key_and_forgets_it(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS, "--api-key", "traffic", "--admin-api-key", "a-secret") as running:
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#sign-in", "This router needs a key")
        assert await chromium.js("return document.activeElement.id") == "key"
        assert running.router.settings.worker_urls == ()
        assert "127.0.0.1" not in await chromium.text("#content")
        await chromium.enter("#key", "wrong")
        await chromium.until_text("#sign-in-error", "wanted the router's admin key")
        await chromium.enter("#key", "traffic")
        await chromium.until_text("#sign-in-error", "this needs the router's admin key")
        await chromium.enter("#key", "a-secret")
        await chromium.until_text("#status", "2 of 2 workers ready")
        assert await chromium.js("return sessionStorage['slime-router-key']") == "a-secret"
        assert await chromium.js("return localStorage['slime-router-key'] ?? null") is None
        await chromium.run(chromium.driver.refresh)
        await chromium.until_text("#status", "2 of 2 workers ready")
        await chromium.click("#forget")
        await chromium.until_text("#sign-in", "This router needs a key")
        assert await chromium.js("return sessionStorage.length") == 0


async def test_names_of_clients_and_workers_are_only_text(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        await generate(running, HOSTILE)
        worker = next(iter(running.router.pool))
        running.router.pool.hold(worker, "health", HOSTILE, "quarantined")
        running.router.pool.set_version(worker, HOSTILE)
        await chromium.open(f"{running.url}/ui")
        assert "<img src=x" in await chromium.until_text("#sessions", "<img src=x")
        assert (await chromium.text("#workers")).count("<script>") == 2
        assert await chromium.js("return document.querySelectorAll('main img, main script').length") == 0
        await chromium.enter("#query", HOSTILE)
        await chromium.until_text("#range", "Matches 1 to 1, of 1 session in all")
        assert await chromium.js("return document.title") == "Overview · slime-router"
        link = await chromium.js("return document.querySelector('#sessions a').href")
        assert httpx.URL(link).path == "/ui/trajectory"
        assert httpx.URL(link).params["session"] == HOSTILE
        assert await chromium.problems() == []


async def test_sessions_are_searched_and_paged(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        for number in range(25):
            await generate(running, f"rollout-{number}")
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#range", "1 to 20 of 25 sessions")
        assert await chromium.js("return document.getElementById('newer').disabled")
        await chromium.click("#older")
        await chromium.until_text("#range", "21 to 25 of 25 sessions")
        assert "rollout-4" in await chromium.text("#sessions")
        assert await chromium.js("return document.getElementById('older').disabled")
        await chromium.enter("#query", "rollout-2")
        await chromium.until_text("#range", "Matches 1 to 6, of 25 sessions in all")
        await chromium.enter("#query", "nothing")
        await chromium.until_text("#sessions", "No name contains this text")


async def test_page_polls_only_while_it_is_visible(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running, quick(chromium):
        await chromium.open(f"{running.url}/ui")
        await chromium.until("window.asked.filter((url) => url.includes('overview')).length > 5")
        await chromium.js(
            "Object.defineProperty(document, 'hidden', {configurable: true, get: () => true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await chromium.until_quiet("window.asked.length")
        await chromium.js("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        seen = await chromium.js("return window.asked.length")
        await chromium.until("window.asked.length > arguments[0] + 3", seen)


async def test_pause_is_told_at_once(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running, quick(chromium):
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#status", "workers ready")
        await running.client.post("/pause_generation", json={})
        await chromium.until_text("#status", "Generation is paused")
        assert "generation is paused" in await chromium.text("#tiles")
        assert "0 requests waiting" in await chromium.text("#paused")
        await running.client.post("/continue_generation", json={})
        await chromium.until_text("#status", "2 of 2 workers ready")
        assert await chromium.text("#paused") == ""


async def test_empty_plots_say_what_is_missing(start: Start, chromium: Browser) -> None:
    async with start() as running, quick(chromium):
        await running.client.post("/generate", json={"text": "a"})  # no worker: it fails, and is a request
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#status", "0 of 0 workers ready")
        plots = await chromium.until_text("#plots", "No tokens counted in this period")
    assert "No streams in this period" in plots
    assert "No prompts counted in this period" in plots


async def test_page_says_which_plugins_are_missing(start: Start, chromium: Browser) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#no-history", "--plugin metrics")
        assert "--plugin radix_cache" in await chromium.text("#no-cache")
        assert "/add_worker?url=" in await chromium.text("#workers")
        assert await chromium.text("#sessions") == ""


async def test_router_that_is_gone_is_told_until_it_is_back(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running, quick(chromium):
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#status", "workers ready")
        await chromium.js("window.kept = window.fetch; window.fetch = () => Promise.reject(new TypeError())")
        await chromium.until_text("#status", "The router cannot be reached")
        await chromium.js("window.fetch = window.kept")
        await chromium.until_text("#status", "2 of 2 workers ready")


async def test_first_key_press_leads_to_the_skip_link(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#status", "workers ready")
        await chromium.press("\ue004")  # Tab
        assert await chromium.js("return document.activeElement.className") == "skip"
        outline = await chromium.js("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        await chromium.press("\ue007")  # Enter
        assert await chromium.js("return document.activeElement.id") == "main"


async def test_theme_follows_the_choice(start: Start, chromium: Browser) -> None:
    async with start(*WITH_TOKENS) as running:
        await chromium.open(f"{running.url}/ui", theme="light")
        await chromium.until_text("#status", "workers ready")
        ground = "return getComputedStyle(document.documentElement).backgroundColor"
        light = await chromium.js(ground)
        await chromium.click("#theme")
        assert await chromium.text("#theme") == "Theme: dark"
        dark = await chromium.js(ground)
        assert dark != light
        await chromium.run(chromium.driver.refresh)
        await chromium.until_text("#theme", "Theme: dark")
        assert await chromium.js(ground) == dark


class Busy(Overview):
    """A page of a router that was busy for a quarter of an hour: the numbers of its plots are made up."""

    def begin(self) -> None:
        super().begin()
        assert self._history is not None
        chance, now = random.Random(7), time.time()
        for number in range(180):
            at = now - 900 + 5 * number
            pause = number % 60 in (8, 9, 10)
            wave = math.sin(number / 14)
            rate = 0.0 if pause else 9 + 2 * wave + chance.uniform(-0.7, 0.7)
            first, whole = chance.uniform(0.11, 0.16), chance.uniform(2.6, 3.3) + 0.3 * wave
            self._history._samples.append(
                Sample(
                    at,
                    round(rate, 2),
                    0.0,
                    0.8 if number in (101, 102) else 0.0,
                    round(rate * 820),
                    round(rate * 260),
                    None if pause else first,
                    None if pause else first * chance.uniform(2.2, 3.4),
                    None if pause else whole,
                    None if pause else whole * chance.uniform(2.1, 2.5),
                    None if pause else 1.0 if number == 60 else 0.8 + chance.uniform(-0.05, 0.05),
                    4 if pause else round(rate * 3),
                    40 if pause else 0,
                )
            )
            if number % 60 == 10:
                self._updates.append((at, str(5 + number // 60)))


async def test_narrow_window_needs_no_scrolling_and_tears_no_number(
    start: Start, chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_dashboard.plugin.Overview", Busy)
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    async with start(*WITH_TOKENS) as running:
        text = await generate(running, "s" * 300)
        await running.client.post("/retrieve_from_text", json={"text": text})
        await chromium.open(f"{running.url}/ui")
        await chromium.run(chromium.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", narrow)
        try:
            await chromium.until_text("#sessions", "sss")
            widths = await chromium.js("return [innerWidth, document.documentElement.scrollWidth]")
            await chromium.until_text("#exactness", "100 %")
            torn = await chromium.js(TORN)
        finally:
            await chromium.run(chromium.driver.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
    assert widths == [360, 360]
    assert torn == []


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_page_of_a_busy_router_can_be_pictured(
    theme: str,
    start: Start,
    chromium: Browser,
    keep_picture: Callable[[str, bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime_dashboard.plugin.Overview", Busy)
    async with start(*WITH_TOKENS, "--engine-workers", "3", "--engine-seed", "1") as running:
        await running.router.announce_weights("7", "announced")
        await _converse(running)
        await chromium.open(f"{running.url}/ui", theme)
        await chromium.until_text("#sessions", "rollout-11")
        label = await chromium.js("return document.querySelector('.plot').getAttribute('aria-label')")
        assert label.startswith("Requests per second; now, mean and maximum: succeeded (2xx) ")
        assert "failed (5xx) or broken off 0, 0.0" in label
        shown = await chromium.js("return document.querySelectorAll('.plot canvas').length")
        assert shown == 6
        keep_picture(f"dashboard-{theme}", await chromium.screenshot())
        assert await chromium.problems() == []
        await chromium.click("input[name=period][value='300']")
        changed = await chromium.js("return document.querySelector('.plot').getAttribute('aria-label')")
        assert changed != label


async def _converse(running: Running) -> None:
    """Let twelve sessions speak, and hold one of the workers back."""
    router: Router = running.router
    for number in range(12):
        text = f"Question {number}: how far away is the moon?"
        for _ in range(1 + number % 3):
            text = await generate(running, f"rollout-{number}", text + " ")
        asked = text if number % 4 else f"{text} and more"
        await running.client.post("/retrieve_from_text", json={"text": asked})
    _, held, busy = router.pool
    router.pool.hold(held, "health", "connection refused", "quarantined")
    busy.in_flight = 17
