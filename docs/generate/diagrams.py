"""Mermaid diagrams as SVG files, made without a browser; the pages load no script for them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import mermaidx

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


class Diagrams:
    """Draws each diagram into ``folder``, in grey: site.css inverts it in dark colours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)

    def replace(self, text: str, page: str) -> str:
        """Return the text of ``page`` with images instead of Mermaid code."""

        def drawn(match: re.Match[str]) -> str:
            title = _HEADING.findall(text, 0, match.start())[-1].replace("`", "")
            file = self._folder / f"{hashlib.sha256(match[1].encode()).hexdigest()[:12]}.svg"
            try:
                file.write_text(mermaidx.render(match[1], theme="neutral").svg())
            except RuntimeError as error:
                raise SystemExit(f"{page}, {title}: Mermaid cannot draw this: {error}") from None
            up = "../" * page.count("/")
            return f"![{title}, as a diagram]({up}{self._folder.name}/{file.name}){{ .diagram }}"

        return _DIAGRAM.sub(drawn, text)
