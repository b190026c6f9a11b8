"""The router's version, in ``pyproject.toml`` and in the files of the repository that repeat it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["set_version", "version_faults"]

#: Files, each with a pattern that has one match in the file. The only group of the pattern is the version.
_PLACES = (
    ("pyproject.toml", r'^version = "(.+)"$'),
    ("docs/openapi.yaml", r"^  version: (\S+)$"),
    ("docs/deploy/kubernetes.md", r"^    image: \{repository: \S+, tag: (\S+)\}$"),
    ("deploy/Dockerfile", r"^ARG VERSION=(\S+)$"),
    ("deploy/helm/slime-router/Chart.yaml", r"^version: (\S+)$"),
    ("deploy/helm/slime-router/Chart.yaml", r"^appVersion: (\S+)$"),
    ("deploy/kubernetes/kustomization.yaml", r"^    newTag: (\S+)$"),
)


def _found(text: str, pattern: str) -> list[re.Match[str]]:
    return list(re.finditer(pattern, text, re.MULTILINE))


def version_faults(root: Path, version: str) -> list[str]:
    """Return the places in ``root`` that do not have ``version``."""
    faults = []
    for name, pattern in _PLACES:
        told = [match[1] for match in _found((root / name).read_text(), pattern)]
        if told != [version]:
            faults.append(f"{name}: wanted {version} once as {pattern}, found {told}")
    return faults


def set_version(root: Path, version: str) -> None:
    """Write ``version`` into each of the places in ``root``."""
    for name, pattern in _PLACES:
        path = root / name
        text = path.read_text()
        (match,) = _found(text, pattern)
        path.write_text(f"{text[: match.start(1)]}{version}{text[match.end(1) :]}")
