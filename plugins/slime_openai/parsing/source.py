"""Text that comes in pieces, read from the beginning to the end as if it were all there.

Who reads is a generator: it asks a :class:`Source` for what should come next, and ``yield`` within waits for more
text. So a grammar reads like one, and how the text was split cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from slime_openai.parsing.marks import find, held

__all__ = ["NEWLINES", "SPACE", "Malformed", "Reading", "Source"]

T = TypeVar("T")
#: A generator that reads, and returns a ``T`` in the end.
Reading: TypeAlias = Generator[None, None, T]

SPACE = re.compile(r"[ \t\r\n]*")
NEWLINES = re.compile(r"\n*")


class Malformed(Exception):
    """The text does not go on as it should, or it ends too early."""


class Source:
    """``text[at:]`` is next. What was read stays until it is taken, so that there is a way back.

    Who holds an index over a ``yield`` holds a wrong one: what was taken is gone by then. Hence ``offset``.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._taken = 0

    def push(self, text: str) -> None:
        """Append ``text``."""
        self.text = self.text[self._taken :] + text
        self.at -= self._taken
        self._taken = 0

    def take(self) -> str:
        """Return the text read since the last take, and give it up: reading cannot go back before it."""
        text = self.text[self._taken : self.at]
        self._taken = self.at
        return text

    @property
    def offset(self) -> int:
        """The number of characters read since the last take."""
        return self.at - self._taken

    def back(self, offset: int = 0) -> None:
        """Read again from ``offset``."""
        self.at = self._taken + offset

    def since(self, offset: int) -> str:
        """Return the text read from ``offset`` on."""
        return self.text[self._taken + offset : self.at]

    def wait(self) -> Reading[None]:
        """More text. Raises Malformed at the end."""
        if self.ended:
            raise Malformed
        yield

    def peek(self) -> Reading[str]:
        """The next character. Raises Malformed at the end."""
        while self.at == len(self.text):
            yield from self.wait()
        return self.text[self.at]

    def expect(self, *literals: str) -> Reading[str]:
        """The one of ``literals`` that is next. Raises Malformed."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.at += len(literal)
                    return literal
            rest = self.text[self.at : self.at + max(map(len, literals))]
            if not any(literal.startswith(rest) for literal in literals):
                raise Malformed
            yield from self.wait()

    def spaced(self, *literals: str) -> Reading[str]:
        """The one of ``literals`` that is next behind white space. Raises Malformed."""
        yield from self.run(SPACE)
        return (yield from self.expect(*literals))

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """As many characters as ``pattern`` takes, which is a set of them with a star."""
        begin = self.offset
        while True:
            found = pattern.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.ended:
                return self.since(begin)
            yield

    def pass_on(self, write: Callable[[str], object] | None, *marks: str) -> Reading[str | None]:
        """Write what comes before the first of ``marks``, as it comes; that mark is next then. None at the end.

        Without ``write`` it is only read.
        """
        while True:
            found = find(self.text, marks, self.at)
            if found:
                self.at = found[0]
            else:
                self.at = len(self.text) - (0 if self.ended else held(self.text, marks, self.at))
            if write is not None:
                write(self.take())
            if found or self.ended:
                return found[1] if found else None
            yield

    def attempt(self, reading: Reading[object]) -> Reading[bool]:
        """Try ``reading``, and return True when it succeeds. If it does not, go back to where it began.

        So it must not take anything before it is sure.
        """
        offset = self.offset
        try:
            yield from reading
        except Malformed:
            self.back(offset)
            return False
        return True
