"""The page of symptoms: the messages, codes, metrics and alerts that it quotes are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Sources of messages. The tests in the last directory compare whole messages with those of a real router.
_SOURCES = ("router_core", "plugins", "tests/start")
_SPAN = re.compile(r"`([^`]+)`")
#: Spans with spaces that are no messages: commands, requests, headers and JSON.
_NO_MESSAGE = ("--", "curl ", "slime-router ", "POST ", "GET ", "X-", "Content-Type: ", '"', "{")
#: A place in a text at which the code puts a value.
_VALUE = "\0"
#: Names in the form of a code: a variable of the environment, and a word of a message.
_NO_CODES = {"SLIME_ROUTER_PORT", "NAME"}


def _strings(tree: ast.AST) -> Iterator[str]:
    """Each string of a module but its docstrings, with `_VALUE` where a value goes in."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else _VALUE for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield re.sub(r"%(?:\.\d)?[sdrg]", _VALUE, node.value)


def _texts() -> list[str]:
    paths = [path for source in _SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    return [text for path in paths for text in _strings(ast.parse(path.read_text()))]


TEXTS = _texts()


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [line.strip("| ").split(" | ") for line in lines]


def messages() -> list[str]:
    """Quoted messages: spans of several words."""
    spans = {span for row in rows() for cell in row for span in _SPAN.findall(cell)}
    mistakes = ("--port: ", "--hf-checkpoint ")
    return sorted(
        span
        for span in spans
        if " " in span and (not span.startswith(_NO_MESSAGE) or span.startswith(mistakes))
    )


def in_code(message: str) -> bool:
    """Each part of ``message`` between its ``...`` stands in a string of the code; one of them is long."""
    parts = [part.strip(" '") for part in message.split("...")]
    return any(len(part) > 7 for part in parts) and all(
        any(part in text for text in TEXTS) for part in parts if part
    )


def test_there_are_many_symptoms() -> None:
    assert all(len(row) == 3 for row in rows())
    assert len(rows()) >= 50
    assert len(messages()) >= 25


@pytest.mark.parametrize("message", [m for m in messages() if not m.startswith("--hf-checkpoint PATH")])
def test_each_message_stands_in_the_code(message: str) -> None:
    assert in_code(message)


def test_a_message_that_nobody_writes_is_found() -> None:
    assert in_code("no worker can take requests (registered: ...")
    assert not in_code("no worker can take breakfast (registered: ...")
    assert not in_code("... the ...")


def test_each_code_and_reason_stands_in_the_code() -> None:
    reasons = PAGE.partition("## Samples that are not exact")[2].partition("\n## ")[0]
    named = {
        *re.findall(r"`([A-Z]{2,}[A-Z_]+)`", PAGE),
        *re.findall(r"^\| `([a-z]\w+:?)` \|", reasons, re.MULTILINE),
    }
    assert len(named) > 25
    known = {text.partition(_VALUE)[0] for text in TEXTS}
    assert named - known - _NO_CODES == set()


def test_each_metric_and_alert_is_there() -> None:
    documented = (ROOT / "docs" / "plugins" / "metrics.md").read_text()
    metrics = set(re.findall(r"`((?:slime|smg|process)_\w+)`", PAGE))
    assert metrics
    assert {metric for metric in metrics if metric not in documented} == set()
    alerts = set(re.findall(r"the alert `(\w+)`", PAGE, re.IGNORECASE))
    assert alerts
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert {alert for alert in alerts if f"alert: {alert}\n" not in rules} == set()
