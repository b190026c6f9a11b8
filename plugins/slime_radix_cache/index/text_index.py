"""A radix tree over texts: a given text leads to the segments whose text, context included, is a prefix of it.

Text is stored as UTF-8, so an edge may be cut anywhere and an ASCII character takes one byte. Edges are split
where texts diverge or end. One ``startswith`` call compares a whole edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from slime_radix_cache.index.item_sets import item_set, with_item, without_item
from slime_radix_cache.index.text_node import NO_KIDS, Node

if TYPE_CHECKING:
    from slime_radix_cache.index.segments import Response, Segment

__all__ = ["Path", "TextIndex", "nodes_of", "prompt_end", "text_of"]


class Path(NamedTuple):
    """The longest known prefix of a text: ``position`` bytes, which end on the edge to ``node``.

    ``stops``: the fully matched nodes at which segments end or responses begin, shallowest first.
    """

    position: int
    node: Node
    stops: list[Node]


class TextIndex:
    """Texts and the segments that end in them. ``size_bytes``: stored text; ``nodes``: all nodes but the root."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0)
        self.nodes = 0
        self.size_bytes = 0

    def walk(self, text: bytes) -> Path:
        """Follow ``text`` as far as it is known. O(edges on the way); changes nothing."""
        node = self.root
        position = 0
        stops: list[Node] = []
        size = len(text)
        while position < size:
            kid = node.kids
            if not isinstance(kid, Node):
                slot = kid[0].find(text[position])
                if slot < 0:
                    break
                kid = kid[slot + 1]
            edge = kid.edge
            if not text.startswith(edge, position):
                common = _common(edge, text, position)
                if not common:
                    break
                return Path(position + common, kid, stops)
            node = kid
            position += len(edge)
            if node.ended is not None or (node.responses is not None and node.begun is not None):
                stops.append(node)
        return Path(position, node, stops)

    def insert(self, text: bytes, below: Node | None = None) -> Node:
        """Return the node at the end of ``text``, which begins at ``below`` (default: root). Create missing nodes."""
        node = below if below is not None else self.root
        position = 0
        size = len(text)
        while position < size:
            kid = node.kid_at(text[position])
            if kid is None:
                return self._grow(node, text[position:])
            if text.startswith(kid.edge, position):
                node = kid
            else:
                node = self._split(node, kid, _common(kid.edge, text, position))
            position += len(node.edge)
        return node

    def _grow(self, node: Node, edge: bytes) -> Node:
        leaf = Node(node, edge, node.depth + len(edge))
        node.add(leaf)
        self.nodes += 1
        self.size_bytes += len(edge)
        return leaf

    def _split(self, parent: Node, lower: Node, length: int) -> Node:
        """Cut the edge from ``parent`` to ``lower`` after ``length`` bytes; returns the new node at the cut."""
        upper = Node(parent, lower.edge[:length], parent.depth + length)
        parent.replace(lower, upper)
        lower.parent = upper
        lower.edge = lower.edge[length:]
        upper.kids = lower
        upper.passing = item_set([response for response in lower.through if response.start < upper.depth])
        self.nodes += 1
        return upper

    def attach(self, segment: Segment, node: Node) -> None:
        """Note that the text of ``segment`` ends at ``node``."""
        node.ended = with_item(node.ended, segment)

    def begin(self, response: Response, node: Node) -> None:
        """Note that the prompt of ``response`` ends at ``node``."""
        if node.responses is None:
            node.responses = response
        else:
            node.begin(response)

    def unbegin(self, response: Response, node: Node) -> None:
        """Undo :meth:`begin`, and drop the text that no segment needs any more."""
        if node.responses is response:
            node.responses = None
        else:
            node.unbegin(response)
        if node.begun is None and node.ended is None:
            self._prune(node)

    def cover(self, response: Response) -> None:
        """Note that ``response`` may be cut anywhere in its text."""
        for node in _covered(response):
            if node.responses is None:
                node.responses = response
            else:
                node.passing = with_item(node.passing, response)

    def uncover(self, response: Response) -> None:
        """Undo :meth:`cover`."""
        for node in _covered(response):
            if node.responses is response:
                node.responses = None
            else:
                node.passing = without_item(node.passing, response)

    def detach(self, segment: Segment, node: Node) -> None:
        """Undo :meth:`attach`, and drop the text that no segment needs any more."""
        node.ended = without_item(node.ended, segment)
        if node.ended is None and node.begun is None:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        while (parent := node.parent) is not None and node.ended is None and node.begun is None:
            kid = node.kids
            if kid is NO_KIDS:
                self.size_bytes -= len(node.edge)
                parent.drop(node)
            elif isinstance(kid, tuple):
                return
            else:
                kid.edge = node.edge + kid.edge
                kid.parent = parent
                parent.replace(node, kid)
            self.nodes -= 1
            node = parent


def text_of(node: Node, above: Node | None = None) -> bytes:
    """Return the text from ``above`` (default: the root) to ``node``. O(its length)."""
    edges = []
    while node.parent is not None and node is not above:
        edges.append(node.edge)
        node = node.parent
    edges.reverse()
    return b"".join(edges)


def prompt_end(response: Response) -> Node:
    """Return the node at which the prompt of ``response`` ends."""
    node = response.node
    while node.depth > response.start:
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent
    return node


def nodes_of(response: Response) -> Iterator[Node]:
    """Yield the nodes that refer to ``response``: at its ends, in its text, and at the end of its prompt."""
    yield response.end
    node = response.node
    while node.depth > response.start:
        yield node
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent
    yield node
    if response.reach is response.end:
        yield from _covered(response)


def _covered(response: Response) -> Iterator[Node]:
    node = response.reach
    while node.depth > response.start:
        yield node
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent


def _common(edge: bytes, text: bytes, position: int) -> int:
    """Return the length of the common prefix of ``edge`` and ``text[position:]``, by binary search over slices."""
    low, high = 0, min(len(edge), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low:middle], position + low):
            low = middle
        else:
            high = middle - 1
    return low
