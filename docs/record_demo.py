"""Records the demo's output as a picture: ``python -m docs.record_demo`` writes docs/images/demo.svg.

The demo samples at random. It runs again until the tokens of its example are readable, since a piece of a character is
shown as U+FFFD. The figures in the picture are from that last run.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

_PICTURE = Path(__file__).parent / "images" / "demo.svg"
_COLUMNS = 72
_RUNS = 40
#: Rich's format without fonts from elsewhere; each piece of text has its width, so other fonts keep the columns.
SVG_FORMAT = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
)


def _output() -> str:
    """Return what the demo writes to a terminal with colours."""
    terminal = {**os.environ, "COLUMNS": str(_COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "router_core", "demo"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=terminal)
    return run.stdout.rpartition("\x1b[2K")[2]


def _readable() -> str:
    for _ in range(_RUNS):
        output = _output()
        if "For example" in output and "\N{REPLACEMENT CHARACTER}" not in output:
            return output
    raise SystemExit(f"none of {_RUNS} runs has an example with readable tokens")


def main() -> None:
    """Run the demo, and write the picture."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), "slime-router demo"))
    console.print(Text.from_ansi(_readable().rstrip()))
    _PICTURE.parent.mkdir(exist_ok=True)
    _PICTURE.write_text(
        console.export_svg(title="slime-router demo", code_format=SVG_FORMAT, unique_id="demo")
    )


if __name__ == "__main__":
    main()
