"""The wheel holds what an installed router needs, and nothing that would get in somebody's way."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import router_core
from wheels import ROOT, build_wheel

#: Not code, and not data that is read at run time.
_LEFT_OUT = ("__pycache__", ".pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(ROOT, tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


def packages() -> list[Path]:
    """The core and every plugin of the repository."""
    return [ROOT / "router_core", *sorted(path.parent for path in (ROOT / "plugins").glob("*/__init__.py"))]


def entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    parser = configparser.ConfigParser(delimiters="=")
    parser.read_string(wheel.read(name).decode())
    return {section: dict(parser[section]) for section in parser.sections()}


def test_the_wheel_holds_the_core_and_every_plugin_with_all_their_files(names: set[str]) -> None:
    assert len(packages()) > 5
    for package in packages():
        files = {
            (package.name / path.relative_to(package)).as_posix()
            for path in package.rglob("*")
            if path.is_file() and not path.as_posix().endswith(_LEFT_OUT)
        }
        assert files <= names, f"missing: {sorted(files - names)}"


def test_the_description_of_the_routes_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("slime_openapi/openapi.yaml") == (ROOT / "docs" / "openapi.yaml").read_bytes()


def test_each_package_says_that_it_is_typed(names: set[str]) -> None:
    missing = [package.name for package in packages() if f"{package.name}/py.typed" not in names]
    assert missing == []


def test_each_entry_points_module_is_in_the_wheel(wheel: zipfile.ZipFile, names: set[str]) -> None:
    points = entry_points(wheel)
    assert set(points) == {"console_scripts", "slime_router", "slime_router.commands"}
    assert {"health", "policies", "r3", "radix_cache", "engine"} <= set(points["slime_router"])
    assert {"demo", "engine"} <= set(points["slime_router.commands"])
    for group in points.values():
        for name, target in group.items():
            path = target.partition(":")[0].replace(".", "/")
            assert names & {f"{path}.py", f"{path}/__init__.py"}, f"{name} = {target} leads nowhere"


def test_nothing_else_is_put_at_the_top(names: set[str]) -> None:
    top = {PurePosixPath(name).parts[0] for name in names}
    (info,) = [name for name in top if name.endswith(".dist-info")]
    assert top - {info} == {package.name for package in packages()}
    assert not top & {"plugins", "tests", "examples", "benchmarks", "docs", "shims", "conftest.py"}


def test_no_test_and_no_leftover_is_in_the_wheel(names: set[str]) -> None:
    parts = {part for name in names for part in PurePosixPath(name).parts}
    assert not [part for part in parts if part.startswith("test_") or part in ("tests", "__pycache__")]


def test_the_licence_and_the_readme_come_along(wheel: zipfile.ZipFile, names: set[str]) -> None:
    (metadata,) = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0" in metadata
    assert "# slime-router" in metadata
    assert [name for name in names if name.endswith("/LICENSE")]


def test_a_compiled_wheel_without_a_compiler_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        env={**os.environ, "SLIME_ROUTER_COMPILE": "1", "CC": "no-such-compiler"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "found no no-such-compiler: install gcc, or leave the variable unset" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("TOX_ENV_DIR" not in os.environ, reason="only tox installs the wheel")
def test_under_tox_it_is_the_wheel_that_is_tested() -> None:
    assert Path(router_core.__file__).is_relative_to(os.environ["TOX_ENV_DIR"])
    asked = [sys.executable, "-c", "import router_core; print(router_core.__file__)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert Path(found).is_relative_to(os.environ["TOX_ENV_DIR"])
