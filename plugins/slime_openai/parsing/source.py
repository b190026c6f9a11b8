"""Text that comes in pieces, read as if the whole text had come already.

A reader is a generator. The reader asks a :class:`Source` for the part that should come next, and ``yield`` waits for
more text. So the code of a reader looks like a grammar, and its result does not depend on how the text was split.
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
    """Text that does not continue as the grammar requires, or ends too early."""


class Source:
    """A text and a position in it: ``text[at:]`` is next. Text stays until it is taken, so that a reader can go back.

    After a ``yield``, an index into ``text`` may be wrong, since taken text may have been removed. Use an ``offset``.
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
        """Return the text read since the last take, and drop it: a reader cannot go back into it."""
        text = self.text[self._taken : self.at]
        self._taken = self.at
        return text

    @property
    def offset(self) -> int:
        """The number of characters read since the last take."""
        return self.at - self._taken

    def back(self, offset: int = 0) -> None:
        """Go back to ``offset``."""
        self.at = self._taken + offset

    def since(self, offset: int) -> str:
        """Return the text read from ``offset`` on."""
        return self.text[self._taken + offset : self.at]

    def wait(self) -> Reading[None]:
        """Wait for more text. Raises Malformed at the end."""
        if self.ended:
            raise Malformed
        yield

    def peek(self) -> Reading[str]:
        """Return the next character, unread. Raises Malformed at the end."""
        while self.at == len(self.text):
            yield from self.wait()
        return self.text[self.at]

    def expect(self, *literals: str) -> Reading[str]:
        """Read and return the one of ``literals`` that is next. Raises Malformed if none is."""
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
        """Read white space and then one of ``literals``; return the literal. Raises Malformed."""
        yield from self.run(SPACE)
        return (yield from self.expect(*literals))

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read and return all next characters that match ``pattern``, a character set with a star."""
        begin = self.offset
        while True:
            found = pattern.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.ended:
                return self.since(begin)
            yield

    def pass_on(self, write: Callable[[str], object] | None, *marks: str) -> Reading[str | None]:
        """Write the text before the first mark, in pieces as they come. Return the mark, still unread, or None.

        Without ``write`` the text is only read.
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
        """Try ``reading``, and return True when it succeeds. If it fails, go back to its beginning, and return False.

        So ``reading`` must not take text while it may still fail.
        """
        offset = self.offset
        try:
            yield from reading
        except Malformed:
            self.back(offset)
            return False
        return True
