"""Mermaid diagrams as SVG files, made without a browser; the pages load no script for them.

The files are in docs/diagrams. Each is named by a digest of its Mermaid code. To draw one takes two seconds, so a
diagram is drawn only if its file is missing.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import mermaidx

from docs.generate.pages import ROOT

FOLDER = ROOT / "docs" / "diagrams"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def replace(text: str, page: str) -> str:
    """Return the text of ``page`` with images instead of Mermaid code. Images are grey; site.css inverts them."""

    def drawn(match: re.Match[str]) -> str:
        title = _HEADING.findall(text, 0, match.start())[-1].replace("`", "")
        file = file_of(match[1])
        if not file.exists():
            try:
                svg = mermaidx.render(match[1], theme="neutral").svg()
            except RuntimeError as error:
                raise SystemExit(f"{page}, {title}: Mermaid cannot draw this: {error}") from None
            file.write_text(svg)
        return f"![{title}, as a diagram]({'../' * page.count('/')}{FOLDER.name}/{file.name}){{ .diagram }}"

    return DIAGRAM.sub(drawn, text)


def file_of(code: str) -> Path:
    """Return the file of the diagram with this Mermaid ``code``."""
    return FOLDER / f"{hashlib.sha256(code.encode()).hexdigest()[:12]}.svg"
