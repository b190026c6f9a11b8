"""The wheel and the sdist of a commit, built so that anybody can build the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Distributions", "ReleaseError", "build_alike", "checksums", "differences", "run"]

#: The times of files in a zip file have a resolution of two seconds.
_BETWEEN_BUILDS_S = 2.1
_OLD = 1_000_000_000


class ReleaseError(Exception):
    """A fault of the release. The message says what was wanted, and what was found."""


class Distributions(NamedTuple):
    """The wheel and the sdist of one build."""

    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run ``command``, and return its output. Raises ReleaseError, with the output, if it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def build_alike(root: Path, work: Path) -> Distributions:
    """Build the last commit of ``root`` in several ways, below ``work``, and return the first distributions.

    The ways differ in directory, time, time zone, hash seed, file modes and file times; one wheel is built from the
    sdist. Raises ReleaseError for uncommitted changes, if a build fails, or if two builds differ in a byte.
    """
    if changed := run("git", "status", "--porcelain", "--untracked-files=no", cwd=root):
        raise ReleaseError(f"wanted a checkout without uncommitted changes, found\n{changed}")
    epoch = run("git", "log", "-1", "--format=%ct", cwd=root).strip()
    source, other = work / "source", work / "elsewhere" / "with a longer name"
    _export(root, source)
    at = {"SOURCE_DATE_EPOCH": epoch}
    first = _build(source, work / "first", {**at, "TZ": "UTC", "PYTHONHASHSEED": "1"})
    _export(root, other)
    _disturb(other)
    time.sleep(_BETWEEN_BUILDS_S)
    second = _build(other, work / "second", {**at, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"})
    _expect_same(first, second, "built again in another directory")
    unpacked = work / "unpacked"
    with tarfile.open(first.sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (inner,) = unpacked.iterdir()
    wheel = _build_one("--wheel", inner, work / "third", at)
    _expect_same(first[:1], [wheel], "built from the sdist")
    return first


def _export(root: Path, into: Path) -> None:
    """Write the files of the last commit of ``root`` into ``into``."""
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=root, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")


def _disturb(tree: Path) -> None:
    """Give the files below ``tree`` other times and modes."""
    for path in tree.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (_OLD, _OLD))


def _build(source: Path, into: Path, environment: Mapping[str, str]) -> Distributions:
    kinds = ("--wheel", "--sdist")
    return Distributions(*(_build_one(kind, source, into, environment) for kind in kinds))


def _build_one(kind: str, source: Path, into: Path, environment: Mapping[str, str]) -> Path:
    """Build one distribution; without isolation, so that all builds have the same hatchling."""
    before = set(into.glob("*"))
    command = (sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", into, source)
    run(*command, environment=environment)
    (built,) = set(into.glob("*")) - before
    return built


def _expect_same(first: Iterable[Path], second: Iterable[Path], how: str) -> None:
    if different := differences(first, second):
        raise ReleaseError(f"{how}, the bytes differ: {', '.join(different)}")


def differences(first: Iterable[Path], second: Iterable[Path]) -> list[str]:
    """Return the names of files that differ, in name or content."""
    pairs = zip(first, second, strict=True)
    return [one.name for one, two in pairs if one.name != two.name or _sha256(one) != _sha256(two)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checksums(files: Iterable[Path], into: Path) -> Path:
    """Copy ``files`` into the directory ``into``, with a ``SHA256SUMS`` that ``sha256sum --check`` reads.

    Files that are in ``into`` already are only listed.
    """
    copies = [path if path.parent == into else Path(shutil.copy(path, into)) for path in files]
    path = into / "SHA256SUMS"
    path.write_text("".join(f"{_sha256(copy)}  {copy.name}\n" for copy in sorted(copies)))
    return path
