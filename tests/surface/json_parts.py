"""JSON, or nearly, put together from small pieces that come again."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Part", "deep", "items", "member", "members_of", "plain", "string"]


class Part:
    """JSON, or nearly: in ``words``, and as it is written, ``piece`` repeated ``count`` times, or ``parts``.

    No dataclass: hypothesis would show all of its fields.
    """

    def __init__(
        self,
        words: str,
        before: bytes = b"",
        piece: bytes = b"",
        count: int = 0,
        between: bytes = b"",
        after: bytes = b"",
        parts: Sequence[Part | bytes] = (),
    ) -> None:
        self._words = words
        self._ends = before, after
        self._pieces = piece, count, between
        self._parts = parts

    def __repr__(self) -> str:
        return self._words

    @property
    def data(self) -> bytes:
        if self._parts:
            return b"".join(part if isinstance(part, bytes) else part.data for part in self._parts)
        (before, after), (piece, count, between) = self._ends, self._pieces
        return before + between.join([piece] * count) + after


def plain(data: bytes) -> Part:
    """``data`` as it is."""
    return Part(data.decode("latin-1") if len(data) < 80 else f"{data[:60].decode('latin-1')}...", data)


def string(piece: bytes, count: int) -> Part:
    """A string of ``count`` pieces, written as in JSON."""
    return Part(f'"{piece.decode("latin-1")}" x {count:,}', b'"', piece, count, after=b'"')


def items(piece: bytes, count: int) -> Part:
    """A list of ``count`` such items."""
    return Part(f"[{piece.decode('latin-1')}, ...] x {count:,}", b"[", piece, count, b",", b"]")


def deep(opening: bytes, depth: int, closing: bytes, inmost: bytes = b"1") -> Part:
    """``depth`` lists, or objects, each in the other; without ``closing`` they have no end."""
    words = f"{opening.decode()} x {depth:,}{'' if closing else ', no end'}"
    return Part(words, opening * depth + inmost + closing * depth)


def member(name: bytes, count: int, value: bytes = b"1") -> Part:
    """An object with ``count`` members; ``%d`` in ``name`` tells them apart."""
    if b"%d" in name:
        members = b",".join(b'"%b":%b' % (name % number, value) for number in range(count))
        return Part(f"{{{name.decode()}: ...}} x {count:,}", b"{" + members + b"}")
    words = f"{{{name[:20].decode()}: {value.decode()}, again}} x {count:,}"
    return Part(words, b"{", b'"%b":%b' % (name, value), count, b",", b"}")


def members_of(members: Sequence[tuple[str, Part]]) -> Part:
    """An object with ``members``, of which names may come again."""
    words = ", ".join(f'"{name}": {value}' for name, value in members)
    parts: list[Part | bytes] = [b"{"]
    for number, (name, value) in enumerate(members):
        parts += [b'%b"%b":' % (b"," if number else b"", name.encode()), value]
    return Part(f"{{{words}}}", parts=(*parts, b"}"))
