"""Plugins of the command line: their policy goes first, and any ASGI middleware will do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from plugged import Recording
from routers import Start
from slime_http.serving import serving

pytestmark = pytest.mark.anyio

POLICY = """
from router_core import hookimpl

@hookimpl
def select_worker(exchange, workers):
    return next((worker for worker in workers if worker.url == exchange.request.target.decode()[1:]), None)
"""

LAYERS = """
class NoRouter:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        scope.setdefault("state", {})
        await self.app(scope, receive, send)

class OtherNames:
    def __init__(self, inner, header=b"x-layer"):
        self.inner, self.header = inner, header

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (self.header, b"1")]
            await send(message)
        await self.inner(scope, receive, stamped)
"""


async def test_policy_of_a_named_plugin_goes_before_the_default(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "by_url.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    workers: Sequence[Recording] = [Recording("one"), Recording("two")]
    async with serving(workers[0]) as one, serving(workers[1]) as two:
        flags = ["--disable-health-check", "--policy", "round_robin", "--middleware-paths", "by_url"]
        async with start(*flags, "--worker-urls", one, two) as running:
            assert running.router.hooks.choosers == ["by_url", "policies"]
            for url, name in ((one, "one"), (two, "two"), (two, "two"), (one, "one")):
                assert (await running.client.get(f"/{url}")).json() == {"worker": name}
            names = [(await running.client.get("/any")).json()["worker"] for _ in range(4)]
            assert names in (["one", "two"] * 2, ["two", "one"] * 2)  # it left the choice to the default


async def test_middleware_needs_neither_router_nor_the_name_app(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    async with start("--middleware-paths", "plain_layers.NoRouter", "plain_layers.OtherNames") as running:
        assert (await running.client.get("/health")).headers["x-layer"] == "1"
