"""The files of ``deploy/``, and the router's own parser for the flags in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from router_core.cli import command_line
from router_core.settings import Settings

__all__ = ["DEPLOY", "ROOT", "check_flags", "exec_form", "image_variables", "options_of"]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def options_of(words: Sequence[str]) -> dict[str, object]:
    """The options of the command line ``words``, which must have no unknown flag, file key or invalid value."""
    parser, _ = command_line(words)
    options, unknown = parser.parse_known_args(list(words))
    assert unknown == []
    assert parser.unknown_keys == []
    Settings.from_options(options)
    found: dict[str, object] = vars(options)
    return found


def check_flags(text: str, file: Path) -> dict[str, object]:
    """Parse the flags ``text``, written to ``file``, with the router's own parser. Return the options."""
    file.write_text(text)
    return options_of(["--config", str(file)])


def _instructions(name: str) -> list[str]:
    source = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", source, re.MULTILINE)


def exec_form(name: str) -> list[str]:
    """The words of the last instruction ``name`` of the Dockerfile, which must be in the exec form."""
    found = _instructions(name)[-1]
    words: list[str] = json.loads(found[found.index("[") :])
    return words


def image_variables() -> dict[str, str]:
    """The variables that the image sets, except PATH."""
    pairs = (pair.split("=", 1) for pair in _instructions("ENV")[-1].split())
    return {name: value for name, value in pairs if name != "PATH"}
