"""Markdown of generated pages: tables, and the text of docstrings."""

from __future__ import annotations

import inspect
import re

_ROLE = re.compile(r":(?:meth|func|class|attr|data|mod):`~?([^`]+)`")


class Table:
    """A table that leaves out columns in which no row has anything."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Append a row."""
        self._rows.append(cells)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __str__(self) -> str:
        shown = [n for n in range(len(self._columns)) if any(row[n] for row in self._rows)]
        lines = [[self._columns[n] for n in shown], ["---" for _ in shown]]
        lines += [[row[n].replace("|", "\\|").replace("\n", " ") for n in shown] for row in self._rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(words: str) -> str:
    """Return ``words`` as a code span."""
    return f"`{words}`"


def text(words: str) -> str:
    """Return one line of plain help without its full stop, with the characters of Markdown and HTML escaped."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", words.rstrip("."))


def docstring(thing: object) -> str:
    """Return the docstring of ``thing`` as Markdown: code spans, code blocks, roles as code."""
    words = inspect.getdoc(thing) or ""
    words = _ROLE.sub(r"`\1`", words).replace("``", "`")
    return re.sub(r"::\n\n", ":\n\n", words)
