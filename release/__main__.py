"""Builds and checks a release: ``tox -e release`` runs this module. The files to upload are then in ``dist``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from compiled import build_compiled, compiled_faults, earlier_wheels, hot_modules
from contents import metadata_faults, sdist_faults, sdist_names, source_names, wheel_faults
from distributions import Distributions, ReleaseError, build_alike, checksums, run
from history import changelog_faults
from inventory import EXTRAS, unnamed, vendored, write_sbom
from trial import install, try_out
from versions import set_version, version_faults

_ROOT = Path(__file__).parent.parent


@contextmanager
def _step(what: str) -> Iterator[None]:
    began = monotonic()
    print(f"{what} ...", end=" ", flush=True)
    yield
    print(f"ok ({monotonic() - began:.1f} s)")


def _expect_none(faults: list[str]) -> None:
    if faults:
        raise ReleaseError("\n".join(faults))


def _check_history(version: str) -> None:
    _expect_none(version_faults(_ROOT, version))
    tags = run("git", "tag", "--points-at", "HEAD", cwd=_ROOT).split()
    fragments = sorted(path.name for path in (_ROOT / "changelog.d").glob("*.md"))
    _expect_none(changelog_faults(version, tags, (_ROOT / "CHANGELOG.md").read_text(), fragments))
    run(sys.executable, "-m", "towncrier", "build", "--draft", "--version", version, cwd=_ROOT)


def _check_contents(built: Distributions, source: Path, project: dict[str, object]) -> None:
    sources = source_names(source)
    with zipfile.ZipFile(built.wheel) as archive:
        _expect_none(wheel_faults(archive.namelist(), sources))
    _expect_none(sdist_faults(sdist_names(built.sdist), sources))
    licenses = project["license-files"]
    assert isinstance(licenses, list)  # narrowing
    _expect_none(metadata_faults(built.wheel, built.sdist, str(project["version"]), licenses))
    run("check-wheel-contents", built.wheel, cwd=_ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *built)


def release(into: Path) -> None:
    """Build the release of the last commit into the directory ``into``. Raises ReleaseError if a step fails."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        with _step("two builds, and a wheel from the sdist, are the same bytes"):
            built = build_alike(_ROOT, work)
        with _step("the history"):
            _check_history(version)
        with _step("contents and metadata"):
            _check_contents(built, work / "source", project)
            _expect_none(unnamed(_ROOT, vendored(_ROOT)))
        with _step(f"install the wheel with {', '.join(EXTRAS)}, and run the demo"):
            python = install(f"{built.wheel}[{','.join(EXTRAS)}]", work / "of-wheel")
            try_out(python, version, work / "wheel-runs")
        epoch = run("git", "log", "-1", "--format=%ct", cwd=_ROOT).strip()
        sbom = work / f"slime_router-{version}.cdx.json"
        with _step("the SBOM is valid and complete"):
            count = write_sbom(python, _ROOT, sbom, epoch)
        with _step("install the sdist, and run the demo"):
            try_out(install(str(built.sdist), work / "of-sdist"), version, work / "sdist-runs")
        with _step("compile the hot modules"):
            hot = hot_modules(_ROOT)
            compiled = build_compiled(work / "source", work / "compiled", epoch)
            _expect_none(compiled_faults(compiled, built.wheel, hot))
        with _step(f"install {compiled.name}, and run the demo"):
            python = install(str(compiled), work / "of-compiled")
            try_out(python, version, work / "compiled-runs")
            run(python, "-c", "from router_core.cli import is_compiled; assert is_compiled()", cwd=work)
        into.mkdir(parents=True, exist_ok=True)
        earlier = [wheel for wheel in earlier_wheels(into, built.wheel, hot) if wheel.name != compiled.name]
        for old in {*into.glob("slime_router-*")}.difference(earlier):
            old.unlink()
        sums = checksums([*built, compiled, sbom, *earlier], into)
    print(f"{into}: slime-router {version}, an SBOM of {count} components\n{sums.read_text()}", end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build and check a release of the last commit.")
    parser.add_argument("into", nargs="?", type=Path, default=_ROOT / "dist", help="default: dist")
    parser.add_argument(
        "--set-version",
        metavar="VERSION",
        help="write a new version into all files that have the version, and exit",
    )
    options = parser.parse_args()
    try:
        if options.set_version:
            set_version(_ROOT, options.set_version)
        else:
            release(options.into)
    except ReleaseError as error:
        sys.exit(f"failed\n{error}")
