"""The index: a radix tree over text that leads from a text to the segments that end in it.

Text is kept as UTF-8, so an edge may be cut anywhere and ASCII costs a byte a character. Edges are split
wherever texts diverge; one ``startswith`` decides an edge, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_radix_cache.segments import Response, Segment

__all__ = ["Node", "Path", "TextIndex", "text_of"]


class Node:
    """A place in a text: ``depth`` bytes from its beginning, reached from ``parent`` over ``edge``.

    ``kids[i]`` is reached over an edge that begins with the byte ``keys[i]``. ``ends``: segments whose text ends
    here, newest last. ``through``: responses whose text covers some of the edge, newest last; only they can be
    cut inside it. The three lists are None while they are empty: most are.
    """

    __slots__ = ("depth", "edge", "ends", "keys", "kids", "parent", "through")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.keys = b""
        self.kids: list[Node] | None = None
        self.ends: list[Segment] | None = None
        self.through: list[Response] | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """How far a text leads: ``position`` bytes, into the edge of ``node``.

    ``ended`` are the nodes passed in full at which segments end, shallowest first.
    """

    position: int
    node: Node
    ended: list[Node]


class TextIndex:
    """Texts and the segments that end in them. ``size_bytes`` and ``nodes`` count what it holds."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0)
        self.nodes = 0
        self.size_bytes = 0

    def walk(self, text: bytes) -> Path:
        """Follow ``text`` as far as it is known. O(edges on the way); changes nothing."""
        node = self.root
        position = 0
        ended: list[Node] = []
        size = len(text)
        while position < size:
            slot = node.keys.find(text[position])
            if slot < 0:
                break
            kid = node.kids[slot]  # type: ignore[index]  # there is a key, so there is a kid
            edge = kid.edge
            if not text.startswith(edge, position):
                return Path(position + _common(edge, text, position), kid, ended)
            node = kid
            position += len(edge)
            if node.ends is not None:
                ended.append(node)
        return Path(position, node, ended)

    def insert(self, text: bytes, below: Node | None = None) -> Node:
        """The node at which ``text``, read on from ``below`` (default: the root), ends; made if need be."""
        node = below if below is not None else self.root
        position = 0
        size = len(text)
        while position < size:
            slot = node.keys.find(text[position])
            if slot < 0:
                return self._grow(node, text[position:])
            kid = node.kids[slot]  # type: ignore[index]  # there is a key, so there is a kid
            if text.startswith(kid.edge, position):
                node = kid
            else:
                node = self._split(node, kid, _common(kid.edge, text, position))
            position += len(node.edge)
        return node

    def _grow(self, node: Node, edge: bytes) -> Node:
        leaf = Node(node, edge, node.depth + len(edge))
        node.keys += edge[:1]
        if node.kids is None:
            node.kids = [leaf]
        else:
            node.kids.append(leaf)
        self.nodes += 1
        self.size_bytes += len(edge)
        return leaf

    def _split(self, parent: Node, lower: Node, length: int) -> Node:
        """Cut the edge from ``parent`` to ``lower`` after ``length`` bytes; returns the new node in its middle."""
        upper = Node(parent, lower.edge[:length], parent.depth + length)
        _replace(parent, lower, upper)
        lower.parent = upper
        lower.edge = lower.edge[length:]
        upper.keys = lower.edge[:1]
        upper.kids = [lower]
        if lower.through is not None:
            upper.through = [response for response in lower.through if response.start < upper.depth] or None
        self.nodes += 1
        return upper

    def attach(self, segment: Segment, node: Node) -> None:
        """Note that the text of ``segment`` ends at ``node``."""
        if node.ends is None:
            node.ends = [segment]
        else:
            node.ends.append(segment)

    def cover(self, response: Response) -> None:
        """Note that ``response`` may be cut anywhere in its text."""
        for node in _covered(response):
            if node.through is None:
                node.through = [response]
            else:
                node.through.append(response)

    def uncover(self, response: Response) -> None:
        """Undo :meth:`cover`. O(responses that share the text), at once when ``response`` is the oldest."""
        for node in _covered(response):
            assert node.through is not None  # cover put it there, and splits keep it there
            node.through.remove(response)
            if not node.through:
                node.through = None

    def detach(self, segment: Segment, node: Node) -> None:
        """Undo :meth:`attach`, and drop the text that nothing needs any more."""
        assert node.ends is not None  # attach put it there
        node.ends.remove(segment)
        if node.ends:
            return
        node.ends = None
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and node.ends is None and len(node.keys) < 2:
            parent = node.parent
            self.nodes -= 1
            if node.kids is not None:
                kid = node.kids[0]
                kid.edge = node.edge + kid.edge
                kid.parent = parent
                _replace(parent, node, kid)
                return
            self.size_bytes -= len(node.edge)
            slot = parent.keys.index(node.edge[0])
            parent.keys = parent.keys[:slot] + parent.keys[slot + 1 :]
            assert parent.kids is not None  # node is one of them
            del parent.kids[slot]
            if not parent.kids:
                parent.kids = None
            node = parent


def text_of(node: Node) -> bytes:
    """The text that leads to ``node``. O(its length)."""
    edges = []
    while node.parent is not None:
        edges.append(node.edge)
        node = node.parent
    edges.reverse()
    return b"".join(edges)


def _covered(response: Response) -> Iterator[Node]:
    node = response.reach
    while node.depth > response.start:
        yield node
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent


def _replace(parent: Node, old: Node, new: Node) -> None:
    assert parent.kids is not None  # old is one of them
    parent.kids[parent.keys.index(old.edge[0])] = new


def _common(edge: bytes, text: bytes, position: int) -> int:
    """Length of the common prefix of ``edge`` and ``text[position:]``; by halving, since slices compare fast."""
    low, high = 0, min(len(edge), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low:middle], position + low):
            low = middle
        else:
            high = middle - 1
    return low
