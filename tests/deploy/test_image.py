"""The image: its Dockerfile, and its command as a user without rights in a read-only root."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from deadlines import HANG_S, until
from deploy.containers import STATE, UID, contained, rights_of
from deploy.deployed import DEPLOY, ROOT, exec_form, image_variables, options_of
from plugged import Recording
from ports import free_port
from programs import program
from routers import Start
from slime_http.serving import serving

SOURCE = (DEPLOY / "Dockerfile").read_text()
_HEALTHCHECK = DEPLOY / "healthcheck.py"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_hadolint_finds_nothing() -> None:
    command = [program("hadolint"), "--failure-threshold", "style", str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_image_has_a_fixed_user_without_rights() -> None:
    assert re.search(rf"^USER {UID}:{UID}$", SOURCE, re.MULTILINE)
    assert f"--owner={UID} --group={UID} --mode=0700 {STATE}" in SOURCE
    assert f"HF_HOME={STATE}/" in SOURCE


def test_extras_of_the_image_are_in_the_project() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", SOURCE, re.MULTILINE)
    assert set(extras.split(",")) <= project()["project"]["optional-dependencies"].keys()


def test_version_of_the_image_is_that_of_the_project() -> None:
    assert re.findall(r"^ARG VERSION=(.*)$", SOURCE, re.MULTILINE) == [version("slime-router")]


def test_build_context_has_all_sources_of_the_wheel() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    left_out = [line for line in lines if line and not line.startswith(("#", "!"))]
    hatch = project()["tool"]["hatch"]["build"]
    wheel = hatch["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel.get("force-include", {}), *hatch.get("force-include", {})}
    wanted |= {"pyproject.toml", "README.md", "hatch_build.py", "deploy/healthcheck.py"}
    wanted |= {*project()["project"]["license-files"]}
    for path in wanted:
        assert (ROOT / path).exists(), path
        parts = Path(path).parts
        ways = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        assert [rule for rule in left_out for way in ways if fnmatch(way, rule)] == []


def test_healthcheck_of_the_image_asks_at_the_default_port() -> None:
    program = exec_form("HEALTHCHECK")[1]
    assert f"COPY deploy/{_HEALTHCHECK.name} {program}" in SOURCE
    port = options_of([])["port"]
    assert f'"http://127.0.0.1:{port}/health"' in _HEALTHCHECK.read_text()
    assert f"EXPOSE {port}" in SOURCE


def checked(*arguments: str) -> int:
    command = [sys.executable, "-I", str(_HEALTHCHECK), *arguments]
    return subprocess.run(command, capture_output=True, timeout=HANG_S, check=False).returncode


@pytest.mark.anyio
async def test_healthcheck_asks_the_router(start: Start) -> None:
    async with start("--admin-api-key", "secret") as running:
        assert await anyio.to_thread.run_sync(checked, f"{running.url}/health") == 0
        # There is no worker.
        assert await anyio.to_thread.run_sync(checked, f"{running.url}/readiness") == 1
        url = running.url
    assert await anyio.to_thread.run_sync(checked, f"{url}/health") == 1


@pytest.mark.anyio
async def test_image_runs_without_rights_and_drains(tmp_path: Path) -> None:
    """The image's command, user and variables; root, capabilities and mounts of the pod."""
    port = free_port()
    flags = f"port = {port}\nplugin = [state]\nstate-dir = {STATE}/state\n"
    worker = Recording()
    worker.hold = anyio.Event()
    answers: list[int] = []
    async with serving(worker) as engine:
        command = [*exec_form("ENTRYPOINT"), "--config", "/etc/slime-router/flags", "--worker-urls", engine]
        files = {"/etc/slime-router/flags": flags}
        log = tmp_path / "log"
        with contained(command, files, image_variables(), log) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

                async def ask() -> None:
                    answers.append((await client.post("/generate", json={}, timeout=HANG_S)).status_code)

                with anyio.fail_after(HANG_S):
                    while not await healthy(client):
                        assert process.poll() is None, log.read_text()
                        await anyio.sleep(0.05)
                rights = rights_of(process.pid)
                assert (rights.user, rights.capabilities, rights.may_gain) == (UID, 0, False)
                assert rights.root_is_read_only
                # The directory is the container's: the process's own view of it.
                assert (Path(f"/proc/{process.pid}/root{STATE}") / "state" / "workers.json").exists()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask)
                    await until(lambda: "/generate" in [path for path, _, _ in worker.requests])
                    process.send_signal(signal.SIGTERM)
                    await until(lambda: b"shutting down" in log.read_bytes())
                    worker.hold.set()
            code = await anyio.to_thread.run_sync(process.wait, HANG_S)
    assert answers == [200]
    assert code == 0, log.read_text()


async def healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
