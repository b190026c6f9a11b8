"""A plugin that is a distribution of its own: built, installed, and at work in a router's process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from deadlines import HANG_S
from installing import install
from ports import free_port
from routers import Start
from slime_http.serving import serving
from slime_testing import FakeEngine
from wheels import ROOT

EXAMPLE = ROOT / "examples" / "third_party_plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(EXAMPLE, tmp_path_factory.mktemp("turns"))


def seeing(*places: Path) -> dict[str, str]:
    """An environment whose Python finds ``places`` first."""
    path = os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def slime_router(*arguments: str, seen: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router_core", *arguments]
    return subprocess.run(
        command, env=seeing(seen), cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@asynccontextmanager
async def a_router(*arguments: str, seen: Path, cwd: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router in a process of its own, which ends by SIGTERM, with exit code 0."""
    port = free_port()
    command = [sys.executable, "-m", "router_core", "--port", str(port), *arguments]
    process = await anyio.open_process(command, env=seeing(seen), cwd=cwd, stdout=None, stderr=None)
    async with (
        process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_S) as client,
    ):
        with anyio.fail_after(HANG_S):
            while True:
                assert process.returncode is None, "the router has ended"
                try:
                    if (await client.get("/readiness")).is_success:
                        break
                except httpx.ConnectError:
                    pass
                await anyio.sleep(0.05)
        try:
            yield client
        except BaseException:
            process.kill()
            raise
        process.terminate()
        with anyio.fail_after(HANG_S):
            assert await process.wait() == 0


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that answers with the turn that it is told."""
    made = FakeEngine()
    made.rest = lambda _: {"turn": made.headers[-1].get("x-turn")}
    return made


@pytest.mark.anyio
async def test_an_installed_plugin_has_its_hooks_called_with_its_flag(
    installed: Path, tmp_path: Path, engine: FakeEngine
) -> None:
    arguments = ("--plugin", "turns", "--max-turns", "2", "--worker-urls")
    async with (
        serving(engine.app) as worker,
        a_router(*arguments, worker, seen=installed, cwd=tmp_path) as client,
    ):
        ada = {"x-session-id": "ada"}
        for turn in ("1", "2"):
            answer = await client.post("/generate", content=b'{"text": "Hi"}', headers=ada)
            assert answer.json()["turn"] == turn
            assert [*engine.asked[-1].items()][1:] == [("text", "Hi")]  # behind the rid that control gave it
            assert answer.headers["x-turn"] == turn

        refused = await client.post("/generate", content=b'{"text": "Hi"}', headers=ada)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "session 'ada' has had its 2 turns (--max-turns)"

        without_session = await client.post("/generate", content=b'{"text": "Hi"}')
        assert without_session.json()["turn"] is None
        assert (await client.get("/turns")).json() == {"turns": {"ada": 2}, "max_turns": 2}


@pytest.mark.anyio
async def test_a_middleware_class_needs_no_installation(tmp_path: Path, engine: FakeEngine) -> None:
    arguments = ("--middleware-paths", "first_byte.FirstByte", "--worker-urls")
    async with (
        serving(engine.app) as worker,
        a_router(*arguments, worker, seen=EXAMPLE, cwd=tmp_path) as client,
    ):
        answer = await client.post("/generate", content=b"{}")
        assert answer.headers["server-timing"].startswith("router;dur=")
        assert answer.json()["turn"] is None


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["slime_turns", "slime_turns.make_plugin", "slime_turns:make_plugin"])
async def test_a_plugin_needs_no_installation_either(
    path: str, start: Start, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "slime_turns", raising=False)
    arguments = ("--middleware-paths", path, "--max-turns", "1", "--worker-urls")
    async with serving(engine.app) as worker, start(*arguments, worker) as running:
        client = running.client
        statuses = [
            (await client.post("/generate", content=b"{}", headers={"x-session-id": "a"})).status_code
            for _ in range(2)
        ]
        assert statuses == [200, 400]


def test_an_installed_plugin_is_listed_with_its_distribution(installed: Path, tmp_path: Path) -> None:
    listed = slime_router("plugins", seen=installed, cwd=tmp_path)
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("turns ")]
    assert line.split()[:4] == ["turns", "(slime-router-turns)", "Counts", "the"]


def test_the_help_shows_a_plugins_flag_only_when_the_plugin_is_loaded(
    installed: Path, tmp_path: Path
) -> None:
    with_it = slime_router("--plugin", "turns", "--help", seen=installed, cwd=tmp_path)
    without = slime_router("--help", seen=installed, cwd=tmp_path)
    assert (with_it.returncode, without.returncode) == (0, 0)
    assert "turns that a session may have; 0: no limit" in with_it.stdout
    assert "turns that a session may have" not in without.stdout
    assert re.search(r"^  turns +Counts the turns", without.stdout, re.MULTILINE)  # among those not loaded


def test_the_plugin_refuses_a_value_in_one_line(installed: Path, tmp_path: Path) -> None:
    refused = slime_router("--plugin", "turns", "--max-turns", "-1", seen=installed, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "slime-router: --max-turns: wanted 0 or more, got -1\n"


def test_the_examples_own_test_passes_on_the_installed_plugin(installed: Path, tmp_path: Path) -> None:
    # Not in the example's directory, where the source would be found before what is installed.
    test = tmp_path / "test_slime_turns.py"
    test.write_bytes((EXAMPLE / "test_slime_turns.py").read_bytes())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(test)]
    done = subprocess.run(
        command,
        env=seeing(installed),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
