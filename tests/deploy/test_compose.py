"""The compose file: docker compose reads it, and what it starts works together on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from deadlines import HANG_S
from deploy.deployed import DEPLOY, image_variables, options_of
from programs import program
from router_core.cli import main
from routers import Start
from slime_engine.app import make_backend_app
from slime_engine.backends import load_backend
from slime_engine.settings import Settings
from slime_http.serving import serving

yaml = pytest.importorskip("yaml")

COMPOSE = DEPLOY / "compose"
_STATE = "/var/lib/slime-router"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def test_docker_compose_reads_the_file() -> None:
    command = [program("docker-compose"), "-f", str(COMPOSE / "compose.yaml"), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["services"].keys() == services().keys()


def test_mounted_files_exist_and_ports_are_local() -> None:
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_compose_waits_for_the_drain() -> None:
    router = services()["router"]
    grace_s = options_of(router["command"])["shutdown_grace_period_secs"]
    assert isinstance(grace_s, float)
    assert float(router["stop_grace_period"].removesuffix("s")) >= grace_s + 10


def test_dashboard_and_rules_are_where_the_files_look_for_them() -> None:
    grafana, prometheus = services()["grafana"], services()["prometheus"]
    provisioning = COMPOSE / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "slime-router.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    folder = provider["options"]["path"]
    assert f"../grafana:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / home.removeprefix(f"{folder}/")).exists()
    assert source["url"] == "http://prometheus:9090"
    rules = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["rule_files"]
    assert [f"../prometheus/alerts.yml:{path}:ro" in prometheus["volumes"] for path in rules] == [True]


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    settings = Settings()
    async with serving(make_backend_app(settings, lambda: load_backend(settings)), grace_s=1) as url:
        yield url


@pytest.mark.anyio
async def test_what_compose_starts_works_together(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the services, with the paths and the addresses of this machine."""
    for name, value in image_variables().items():
        monkeypatch.setenv(name, value)
    found = services()
    tokenizer = [word.replace(_STATE, str(tmp_path)) for word in found["tokenizer"]["command"]]
    assert await anyio.to_thread.run_sync(main, tokenizer) == 0
    async with engine() as one, engine() as two:
        urls = {"http://engine-1:30001": one, "http://engine-2:30001": two}
        words = [urls.get(word, word).replace(_STATE, str(tmp_path)) for word in found["router"]["command"]]
        assert {one, two} <= set(words)
        async with start(*words) as running:
            body = {
                "text": "Hello",
                "session_id": "s",
                "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
            }
            answer = (await running.client.post("/generate", json=body)).json()
            retrieved = await running.client.post(
                "/retrieve_from_text", json={"text": "Hello" + answer["text"], "session_id": "s"}
            )
            assert sum(retrieved.json()["loss_mask"]) == 8
            scrapes = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
            for scrape in scrapes:
                path = scrape.get("metrics_path", "/metrics")
                # The name by which Prometheus reaches it.
                (target,) = scrape["static_configs"][0]["targets"]
                page = await running.client.get(path, headers={"Host": target})
                assert page.status_code == 200, path
    assert (tmp_path / "state" / "workers.json").exists()
    assert any((tmp_path / "trajectories").iterdir())


def test_engines_of_compose_have_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("engine-1", "engine-2"):
        with pytest.raises(SystemExit):
            main([*services()[name]["command"], "--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in services()[name]["command"] if word.startswith("--"))
