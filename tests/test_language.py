"""The language of docstrings, as far as a test can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from statements import statements_in

ROOT = Path(__file__).parent.parent
_QUESTION = re.compile(r"(Who(se|ever)?|What(ever)?|Which|Where|How|Whether|That|Why|When)(\s|$)")
#: The end of a question in the first line.
_ASKS = re.compile(r"\?(\s|$)")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        nodes += statements_in(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize(
    "directory", ["router_core", "plugins", "tests", "benchmarks", "examples", "release", "shims"]
)
def test_docstrings_say_what_a_thing_is(directory: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / directory).rglob("*.py"))
        for line, text in docstrings(path)
        if _QUESTION.match(text) or _ASKS.search(text.splitlines()[0])
    ]
    assert found == []
