"""examples/policy_plugin: a policy from another package, by --policy."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import anyio
import pytest

from deadlines import until
from installing import install
from router_core import Worker
from router_core.cli import build, main
from routers import Start
from slime_http.serving import serving
from slime_policies.contract import check_policy
from slime_testing import FakeEngine, Running
from wheels import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(ROOT / "examples" / "policy_plugin", tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "weighted_policy", raising=False)


async def _register(running: Running, url: str, weight: str) -> None:
    answer = await running.client.post("/workers", json={"url": url, "labels": {"weight": weight}})
    assert answer.status_code == 202


@pytest.mark.anyio
async def test_workers_get_requests_by_their_weights(start: Start) -> None:
    large, small, enough = FakeEngine(), FakeEngine(), anyio.Event()
    for engine in (large, small):
        engine.rest = lambda _: {"text": "a", "meta_info": {}}
        engine.delay = enough
    async with serving(large.app) as two, serving(small.app) as one, start("--policy", "weighted") as running:
        await _register(running, two, "2")
        await _register(running, one, "1")
        async with anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(lambda: running.client.post("/generate", json={"text": "a"}))
            await until(lambda: len(large.asked) + len(small.asked) == 9)
            enough.set()
    assert (len(large.asked), len(small.asked)) == (6, 3)


@pytest.mark.parametrize("label", ["0", "-1", "nan", "much", ""])
def test_a_wrong_weight_counts_as_one(label: str) -> None:
    policy = importlib.import_module("weighted_policy")
    assert policy.weight(Worker("http://127.0.0.1:1", labels={"weight": label})) == 1.0


def test_the_policy_keeps_the_contract() -> None:
    check_policy(importlib.import_module("weighted_policy").Weighted)


def test_the_help_names_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "cleverest"]) == 2
    assert "weighted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('no GPU')", "weighted_policy:Weighted cannot be used (RuntimeError: no GPU)"),
        ("Weighted = dict", "wanted a policy from weighted_policy:Weighted, got {}"),
    ],
)
def test_a_policy_that_fails_ends_the_start(
    source: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "weighted_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--policy", "weighted"]) == 2
    assert capsys.readouterr().err == f"slime-router: --policy weighted: {told}\n"


_FAULTS = {
    "raise RuntimeError('no turn')": "RuntimeError: no turn",
    "return None": "got None",
    "return workers[0].url": "got 'http",
}


@pytest.mark.anyio
@pytest.mark.parametrize("statement", _FAULTS)
async def test_what_a_policy_breaks_is_blamed_on_it(
    statement: str,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = f"class Weighted:\n    def __call__(self, exchange, workers):\n        {statement}\n"
    (tmp_path / "weighted_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    async with (
        serving(FakeEngine().app) as url,
        start("--policy", "weighted", "--worker-urls", url) as running,
    ):
        answer = await running.client.post("/generate", json={"text": "a"})
        workers = (await running.client.get("/workers")).json()["workers"]
    assert answer.status_code == 500
    assert "plugin 'policies' failed in policy 'weighted'" in answer.json()["error"]["message"]
    assert _FAULTS[statement] in caplog.text
    assert workers[0]["load"] == 0


def test_a_package_cannot_replace_a_policy_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = tmp_path / "other-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[slime_router.policies]\nrandom = nowhere:Nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    build(["--policy", "random"])
    assert "the policy random = nowhere:Nothing is ignored" in caplog.text
