"""Every benchmark script works: it runs in miniature, without errors and inexact answers. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "benchmarks"
_OTHERS = {"late_engine", "plot_history", "quick_worker", "several_routers"}  # programs that measure nothing
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
    return sorted(set(mains) - _OTHERS)


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


class _TinyRun(NamedTuple):
    output: str
    figures: dict[str, Any]
    history: Path


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _TinyRun]:
    """Return a function that runs a script, once for all tests."""

    @cache
    def run(script: str) -> _TinyRun:
        folder = tmp_path_factory.mktemp(script)
        figures, history = folder / "figures.json", folder / "history.jsonl"
        output = _run(script, "--tiny", "--json", str(figures), "--history", str(history)).stdout
        return _TinyRun(output, json.loads(figures.read_text()), history)

    return run


@pytest.mark.parametrize("script", _scripts())
def test_benchmark_runs_without_errors_and_inexact_answers(
    script: str, tiny_run: Callable[[str], _TinyRun]
) -> None:
    output, figures, _ = tiny_run(script)
    for word in ("Traceback", "problem: ", "left out: "):
        assert word not in output, output
    assert figures["samples"]
    assert figures["problems"] == []


def test_radix_prints_each_row_before_it_measures_the_next(tiny_run: Callable[[str], _TinyRun]) -> None:
    output = tiny_run("radix").output
    wanted = [
        "1 of 2: one short key\n",
        "\none short key  ",
        "2 of 2: one conversation\n",
        "\none conversation  ",
    ]
    places = [output.find(text) for text in wanted]
    assert -1 not in places, output
    assert places == sorted(places), output


def test_run_becomes_a_line_of_the_history_and_a_point_of_the_plot(
    tmp_path: Path, tiny_run: Callable[[str], _TinyRun]
) -> None:
    history, svg = tmp_path / "history.jsonl", tmp_path / "plot.svg"
    line = tiny_run("proxy").history.read_text()
    history.write_text(line)
    run = json.loads(line)
    assert {"commit", "dirty", "date", "compiled", "machine", "benchmark", "baseline", "rows"} == set(run)
    assert run["compiled"] is False  # the sources of this tree
    assert (run["benchmark"], run["baseline"]) == ("proxy", "sglang-router")
    assert run["machine"]["cores"] == os.cpu_count()
    bare, conversations = run["rows"]
    assert (bare["scenario"], bare["peer"]) == ("bare, 64 connections", "router, no plugins")
    assert bare["cpu_us"] > 0
    assert bare["ratio"] is bare["baseline_cpu_us"] is bare["exact"] is None  # the gateway is left out here
    assert conversations["scenario"] == "conversations, 64 connections"

    bare["baseline_cpu_us"] = 1.5 * bare["cpu_us"]
    runs = [run | {"dirty": True, "commit": "0123abc", "compiled": compiled} for compiled in (False, True)]
    old = {name: value for name, value in runs[0].items() if name != "compiled"}
    with history.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in (*runs, old))
    _run("plot_history", str(history), str(svg))
    texts = [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert (
        texts.count("1.50 router, no plugins: bare, 64 connections") == 1
    )  # of two runs, one without the field
    assert texts.count("1.50 router, no plugins, compiled: bare, 64 connections") == 1
    assert texts.count("0123abc*") == 3
    assert run["commit"] not in texts  # a run without the gateway is no point


_ROUNDS = """
import json, sys
from pathlib import Path
from benchmarks.options import flags, read
from benchmarks.report import Report

report = Report()
for ours, theirs, exact in (30, 10, 100), (80, 40, 100), (10, 10, float(sys.argv[1])):
    report.add("bare", "router", requests_per_s=ours, cpu_us=ours, exact=exact)
    report.add("bare", "sglang-router", requests_per_s=theirs, cpu_us=theirs)
sys.exit(report.finish(read(flags("").parse_args(["--history", sys.argv[2]]))))
"""


def _rounds(exact: int, history: Path, first: Path = _ROOT) -> int:
    """Write a run to ``history``, if it has no problem. The modules in ``first`` come before all others."""
    path = os.pathsep.join([str(first), str(_ROOT)])  # the benchmarks are in no wheel
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", _ROUNDS, str(exact), str(history)]
    return subprocess.run(command, cwd=_ROOT, env=environment).returncode


def test_history_has_the_median_of_the_ratios_of_all_rounds(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert _rounds(100, history) == 0
    [row] = json.loads(history.read_text())["rows"]
    assert row == {
        "scenario": "bare",
        "peer": "router",
        "ratio": 2,  # of 3, 2, 1; the medians are 30 and 10
        "cpu_us": 30,
        "baseline_cpu_us": 10,
        "exact": 100,
    }


def test_history_tells_that_the_measured_modules_were_compiled(tmp_path: Path) -> None:
    history, package = tmp_path / "history.jsonl", tmp_path / "router_core"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / f"proxy{EXTENSION_SUFFIXES[0]}").touch()  # as beside proxy.py in a compiled wheel
    assert _rounds(100, history, first=tmp_path) == 0
    assert json.loads(history.read_text())["compiled"] is True


def test_run_with_problems_is_no_part_of_the_history(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert _rounds(99, history) == 1
    assert not history.exists()


def test_new_script_would_be_found() -> None:
    """Guard the search itself: without it no script would run, and no test would fail."""
    assert {"chat", "proxy", "relay"} <= set(_scripts())
