"""The wheel with compiled modules, for this platform and this version of Python."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from distributions import run

__all__ = ["build_compiled", "compiled_faults", "earlier_wheels", "hot_modules"]


def hot_modules(root: Path) -> list[str]:
    """Return the modules that ``pyproject.toml`` in ``root`` says to compile, as paths in a wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    modules = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return [path.removeprefix("plugins/") for path in modules]


def build_compiled(source: Path, work: Path, epoch: str) -> Path:
    """Compile the sources in ``source`` below ``work``, and return the wheel. Raises ReleaseError if a command fails.

    ``epoch`` is the SOURCE_DATE_EPOCH. auditwheel finds the oldest glibc on which the wheel runs, and names the wheel
    after it: PyPI accepts compiled wheels for Linux only with such a name.
    """
    environment = {"SLIME_ROUTER_COMPILE": "1", "SOURCE_DATE_EPOCH": epoch}
    run(sys.executable, "-m", "build", "--wheel", "--outdir", work / "built", source, environment=environment)
    (built,) = (work / "built").glob("*.whl")
    run("auditwheel", "repair", "--wheel-dir", work / "repaired", built, environment=environment)
    (wheel,) = (work / "repaired").glob("*.whl")
    return wheel


def compiled_faults(wheel: Path, plain: Path, hot: Sequence[str]) -> list[str]:
    """Return the faults of ``wheel``, which must have the files of ``plain`` and the compiled modules ``hot``."""
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(plain) as other:
        names, wanted = _sources(archive.namelist()), _sources(other.namelist())
        faults = [f"{name}: missing" for name in wanted - names]
        faults += [
            f"{name}: not as in {plain.name}"
            for name in wanted & names
            if archive.read(name) != other.read(name)
        ]
        libraries = [PurePosixPath(name) for name in archive.namelist() if name.endswith(".so")]
    compiled = {str(path.with_name(path.name.partition(".")[0] + ".py")) for path in libraries}
    faults += [f"{name}: not compiled" for name in hot if name not in compiled]
    faults += [f"{name}: a stray file" for name in names - wanted if not name.endswith(".so")]
    return sorted(faults)


def earlier_wheels(into: Path, plain: Path, hot: Sequence[str]) -> list[Path]:
    """Return the compiled wheels in ``into``, for any Python, that have the sources of ``plain`` and all of ``hot``."""
    others = into.glob(plain.name.replace("py3-none-any", "cp*"))
    return sorted(wheel for wheel in others if not compiled_faults(wheel, plain, hot))


def _sources(names: Collection[str]) -> set[str]:
    """Return ``names`` without directories, which auditwheel lists, and without the files of ``.dist-info``."""
    return {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
