"""Checks of what a wheel and an sdist hold."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Collection, Iterable
from email.parser import Parser
from pathlib import Path, PurePosixPath

__all__ = ["metadata_faults", "sdist_faults", "sdist_names", "source_names", "wheel_faults"]

#: Files of an sdist that are not sources.
_AT_THE_TOP = frozenset(
    (
        ".gitignore", "CHANGELOG.md", "LICENSE", "NOTICE", "PKG-INFO", "README.md", "docs/openapi.yaml",
        "hatch_build.py", "pyproject.toml",
    )
)  # fmt: skip
_ADDED = {"docs/openapi.yaml": "slime_openapi/openapi.yaml"}
_KINDS = frozenset(
    (
        ".LICENSE", ".VERSION", ".css", ".html", ".jinja", ".js", ".py", ".svg", ".txt", ".typed", ".yaml",
    )
)  # fmt: skip
_TESTS = ("tests", "test", "conftest.py")


def source_names(root: Path) -> set[str]:
    """Return the names that the files of the core and of the plugins in ``root`` have in a wheel."""
    found = {path.relative_to(root).as_posix() for path in (root / "router_core").rglob("*")}
    found |= {path.relative_to(root / "plugins").as_posix() for path in (root / "plugins").rglob("*")}
    files = {name for name in found if (root / name).is_file() or (root / "plugins" / name).is_file()}
    return files | set(_ADDED.values())


def wheel_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """Return what is wrong with a wheel of the files ``names``, made from ``sources``."""
    own = [name for name in names if not PurePosixPath(name).parts[0].endswith(".dist-info")]
    packages = {PurePosixPath(name).parts[0] for name in sources}
    faults = [f"{name}: missing" for name in sources if name not in names]
    faults += [f"{name}: not a file of the sources" for name in own if name not in sources]
    faults += [f"{package}/py.typed: missing" for package in packages if f"{package}/py.typed" not in names]
    return sorted({*faults, *_stray(own)})


def sdist_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """Return what is wrong with an sdist of the files ``names`` (without its first directory)."""
    added = set(_ADDED.values())
    wanted = {_in_sdist(name) for name in sources if name not in added} | _AT_THE_TOP
    faults = [f"{name}: missing" for name in wanted if name not in names]
    faults += [f"{name}: not needed to build" for name in names if name not in wanted]
    return sorted({*faults, *_stray(name for name in names if name not in _AT_THE_TOP)})


def _in_sdist(name: str) -> str:
    return name if name.startswith("router_core/") else f"plugins/{name}"


def _stray(names: Iterable[str]) -> list[str]:
    """Return a fault for each of ``names`` that is a test, or that has a suffix which no file of a package has."""
    faults = []
    for name in names:
        path = PurePosixPath(name)
        if any(part in _TESTS or part.startswith("test_") for part in path.parts):
            faults.append(f"{name}: a test")
        elif path.suffix not in _KINDS:
            faults.append(f"{name}: a stray file")
    return faults


def sdist_names(sdist: Path) -> set[str]:
    """Return the names of the files in ``sdist``, without its first directory."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if not member.isdir()}


def metadata_faults(wheel: Path, sdist: Path, version: str, licenses: Collection[str]) -> list[str]:
    """Return what is wrong with the metadata: a version other than ``version``, or a missing license file."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {PurePosixPath(name).parts[0] for name in names if ".dist-info/" in name}
        of_wheel = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    with tarfile.open(sdist) as packed:
        (member,) = [each for each in packed if each.name.count("/") == 1 and each.name.endswith("/PKG-INFO")]
        file = packed.extractfile(member)
        assert file is not None  # narrowing: it is a file
        of_sdist = Parser().parsestr(file.read().decode())
    faults = []
    for kind, metadata in (("wheel", of_wheel), ("sdist", of_sdist)):
        if metadata["Version"] != version:
            faults.append(f"{kind}: version {metadata['Version']}, wanted {version} of pyproject.toml")
        told = set(metadata.get_all("License-File", []))
        faults += [f"{kind}: License-File {name} is missing" for name in sorted(set(licenses) - told)]
    faults += [
        f"wheel: {info}/licenses/{name} is missing"
        for name in sorted(licenses)
        if f"{info}/licenses/{name}" not in names
    ]
    return faults
