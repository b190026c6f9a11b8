"""Every benchmark script works: it runs in miniature, without errors and inexact answers. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "benchmarks"
_WORKERS = {"late_engine", "quick_worker"}  # programs that the scripts start
_DEADLINE_S = 300
_NOT_FOUND = 2

pytestmark = [
    pytest.mark.skipif(not _FOLDER.is_dir(), reason="the benchmarks are not part of the wheel"),
    pytest.mark.skipif(
        not {0, 1} <= os.sched_getaffinity(0), reason="the benchmarks pin their processes to cores 0 and 1"
    ),
]


def _scripts() -> list[str]:
    """Every module of the folder that can be run, so that a new one is not forgotten."""
    mains = (path.stem for path in _FOLDER.glob("*.py") if '\nif __name__ == "__main__":' in path.read_text())
    return sorted(set(mains) - _WORKERS)


def _run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the folder. ``stdout`` of the result has the output of both streams, in order."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_ROOT), *([inherited] if inherited else [])])
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *flags],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
    )
    if ended.returncode == _NOT_FOUND and " not found; on Debian: " in ended.stdout:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout
    return ended


@pytest.mark.parametrize("script", _scripts())
def test_benchmark_runs_without_errors_and_inexact_answers(script: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ended = _run(script, "--tiny", "--json", str(figures))
    for word in ("Traceback", "problem: ", "left out: "):
        assert word not in ended.stdout, ended.stdout
    told = json.loads(figures.read_text())
    assert told["samples"]
    assert told["problems"] == []


def test_radix_prints_each_row_before_it_measures_the_next() -> None:
    output = _run("radix", "--tiny", "--only", "nothing else").stdout
    wanted = [
        "1 of 2: one short key\n",
        "\none short key  ",
        "2 of 2: one conversation\n",
        "\none conversation  ",
    ]
    places = [output.find(text) for text in wanted]
    assert -1 not in places, output
    assert places == sorted(places), output


def test_new_script_would_be_found() -> None:
    """Guard the search itself: without it no script would run, and no test would fail."""
    assert {"chat", "proxy", "relay"} <= set(_scripts())
