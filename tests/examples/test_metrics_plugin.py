"""examples/metrics_plugin: metrics from another package, at /metrics."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import anyio
import pytest

from deadlines import HANG_S
from installing import install
from metrics.scrapes import scraped
from routers import Start
from wheels import ROOT

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(ROOT / "examples" / "metrics_plugin", tmp_path_factory.mktemp("metrics"))


@pytest.fixture(autouse=True)
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "off_policy_metrics", raising=False)


async def test_generations_across_a_weight_update_are_counted(start: Start) -> None:
    arguments = ("--plugin", "off_policy", "--plugin", "engine", "--engine-tokens-per-second", "50")
    endless = {"text": "Hi", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
    async with start(*arguments) as running:
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(partial(running.client.post, "/generate", json=endless))
                while (await scraped(running.client))["generations_under_way", ""] < 3:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                announced = await running.client.post("/weight_version", json={"weight_version": "2"})
                assert announced.status_code == 200
                aborted = await running.client.post("/abort_request", json={"abort_all": True})
                assert aborted.status_code == 200
        numbers = await scraped(running.client)
    assert numbers["generations_under_way", ""] == 0
    assert numbers["generations_across_updates_total", "source=announced"] == 3
