"""Each YAML file below deploy/ has one way of writing, and no key twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.deployed import DEPLOY

yaml = pytest.importorskip("yaml")
config = pytest.importorskip("yamllint.config", reason="yamllint is not installed: pip install yamllint")
linter = pytest.importorskip("yamllint.linter")

#: Of the default rules, those that Kubernetes' and Compose's own examples do not keep are left out.
_RULES = """
extends: default
rules:
  braces: {max-spaces-inside: 0}
  document-start: disable
  line-length: disable
  comments: {min-spaces-from-content: 1}
"""


def files() -> list[Path]:
    found = [path for ending in ("*.yaml", "*.yml") for path in DEPLOY.rglob(ending)]
    return sorted(path for path in found if path.parent.name != "templates")


def test_there_are_files() -> None:
    assert len(files()) > 10


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yamllint_finds_nothing(path: Path) -> None:
    problems = list(linter.run(path.read_text(), config.YamlLintConfig(_RULES), str(path)))
    assert [f"{problem.line}: {problem.desc}" for problem in problems] == []
