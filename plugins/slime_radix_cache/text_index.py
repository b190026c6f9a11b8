"""The index: a radix tree over text that leads from a text to the segments that end in it.

Text is kept as UTF-8, so an edge may be cut anywhere and ASCII costs a byte a character. Edges are split
wherever texts diverge; one ``startswith`` decides an edge, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from slime_radix_cache.segments import Response, Segment

__all__ = ["Node", "Path", "Row", "TextIndex", "prompt_end", "text_of", "with_item", "without_item"]

_T = TypeVar("_T")
#: Items in a row: a few in a tuple, many in a dict, which grows and shrinks without a copy.
Row: TypeAlias = "tuple[_T, ...] | dict[_T, None]"
#: So many are looked through, and copied for each one that comes.
_MANY = 64


class Node:
    """A place in a text: ``depth`` bytes from its beginning, reached from ``parent`` over ``edge``.

    ``kid`` is the only one, or None; of several, ``kids[i]`` is reached over an edge that begins with the byte
    ``keys[i]``. ``ends``: segments whose text ends here, newest last. ``through``: responses whose text covers some
    of the edge, newest last; only they can be cut inside it. Nearly all are short and change seldom: a tuple takes half
    the memory of a list. ``begun``: the only response whose prompt ends here, nearly always, or several, or many by
    session, or None.
    """

    __slots__ = ("begun", "depth", "edge", "ends", "keys", "kid", "kids", "parent", "through")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.kid: Node | None = None
        self.keys = b""
        self.kids: tuple[Node, ...] = ()
        self.ends: Row[Segment] = ()
        self.begun: Response | tuple[Response, ...] | dict[str | None, Row[Response]] | None = None
        self.through: Row[Response] = ()

    def kid_at(self, byte: int) -> Node | None:
        """The kid whose edge begins with ``byte``."""
        if self.kid is not None:
            return self.kid if self.kid.edge[0] == byte else None
        slot = self.keys.find(byte)
        return self.kids[slot] if slot >= 0 else None

    @property
    def all_kids(self) -> tuple[Node, ...]:
        """One, several, or none."""
        return (self.kid,) if self.kid is not None else self.kids

    @property
    def begins(self) -> tuple[Response, ...]:
        """Responses whose prompt ends here; of each session the newest last."""
        begun = self.begun
        if isinstance(begun, dict):
            return tuple(response for some in begun.values() for response in some)
        return () if begun is None else begun if isinstance(begun, tuple) else (begun,)

    def begun_by(self, session: str) -> Row[Response]:
        """Those of ``session``. O(its own, and a few others)."""
        if isinstance(self.begun, dict):
            return self.begun.get(session, ())
        return tuple([response for response in self.begins if response.session == session])

    def begin(self, response: Response) -> None:
        """The prompt of ``response`` ends here."""
        if isinstance(self.begun, dict):
            self.begun[response.session] = with_item(self.begun.get(response.session, ()), response)
            return
        known = self.begins
        if len(known) < _MANY:
            self.begun = (*known, response) if known else response
            return
        self.begun = {}
        for one in (*known, response):
            self.begin(one)

    def unbegin(self, response: Response) -> None:
        """Undo :meth:`begin`."""
        if not isinstance(self.begun, dict):
            rest = [one for one in self.begins if one is not response]
            self.begun = tuple(rest) if len(rest) > 1 else rest[0] if rest else None
            return
        own = without_item(self.begun.pop(response.session), response)
        if own:
            self.begun[response.session] = own
        if not self.begun:
            self.begun = None

    def add(self, kid: Node) -> None:
        """``kid`` begins as none of the others does."""
        if self.kid is not None:
            self.keys = self.kid.edge[:1] + kid.edge[:1]
            self.kids = self.kid, kid
            self.kid = None
        elif self.kids:
            self.keys += kid.edge[:1]
            self.kids += (kid,)
        else:
            self.kid = kid

    def replace(self, old: Node, new: Node) -> None:
        """``new`` begins as ``old`` does and takes its place."""
        if self.kid is old:
            self.kid = new
        else:
            slot = self.keys.index(old.edge[0])
            self.kids = (*self.kids[:slot], new, *self.kids[slot + 1 :])

    def drop(self, kid: Node) -> None:
        """Forget ``kid``."""
        if self.kid is kid:
            self.kid = None
            return
        slot = self.keys.index(kid.edge[0])
        self.keys = self.keys[:slot] + self.keys[slot + 1 :]
        self.kids = self.kids[:slot] + self.kids[slot + 1 :]
        if len(self.kids) == 1:
            [self.kid] = self.kids
            self.keys, self.kids = b"", ()


class Path(NamedTuple):
    """The match of a text: ``position`` bytes, into the edge of ``node``.

    ``stops`` are the nodes passed in full at which segments end or responses begin, shallowest first.
    """

    position: int
    node: Node
    stops: list[Node]


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
        stops: list[Node] = []
        size = len(text)
        while position < size:
            kid = node.kid
            if kid is None:
                slot = node.keys.find(text[position])
                if slot < 0:
                    break
                kid = node.kids[slot]
            edge = kid.edge
            if not text.startswith(edge, position):
                common = _common(edge, text, position)
                if not common:
                    break
                return Path(position + common, kid, stops)
            node = kid
            position += len(edge)
            if node.ends or node.begun is not None:
                stops.append(node)
        return Path(position, node, stops)

    def insert(self, text: bytes, below: Node | None = None) -> Node:
        """The node at which ``text``, read on from ``below`` (default: the root), ends; made if need be."""
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
        """Cut the edge from ``parent`` to ``lower`` after ``length`` bytes; returns the new node in its middle."""
        upper = Node(parent, lower.edge[:length], parent.depth + length)
        parent.replace(lower, upper)
        lower.parent = upper
        lower.edge = lower.edge[length:]
        upper.kid = lower
        above = [response for response in lower.through if response.start < upper.depth]
        upper.through = tuple(above) if len(above) < _MANY else dict.fromkeys(above)
        self.nodes += 1
        return upper

    def attach(self, segment: Segment, node: Node) -> None:
        """Note that the text of ``segment`` ends at ``node``."""
        node.ends = with_item(node.ends, segment)

    def begin(self, response: Response, node: Node) -> None:
        """Note that the prompt of ``response`` ends at ``node``."""
        node.begin(response)

    def unbegin(self, response: Response, node: Node) -> None:
        """Undo :meth:`begin`, and drop the text that nothing needs any more."""
        node.unbegin(response)
        if node.begun is None and not node.ends:
            self._prune(node)

    def cover(self, response: Response) -> None:
        """Note that ``response`` may be cut anywhere in its text."""
        for node in _covered(response):
            node.through = with_item(node.through, response)

    def uncover(self, response: Response) -> None:
        """Undo :meth:`cover`."""
        for node in _covered(response):
            node.through = without_item(node.through, response)

    def detach(self, segment: Segment, node: Node) -> None:
        """Undo :meth:`attach`, and drop the text that nothing needs any more."""
        node.ends = without_item(node.ends, segment)
        if not node.ends and node.begun is None:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and not node.ends and node.begun is None and not node.kids:
            parent, kid = node.parent, node.kid
            self.nodes -= 1
            if kid is not None:
                kid.edge = node.edge + kid.edge
                kid.parent = parent
                parent.replace(node, kid)
                return
            self.size_bytes -= len(node.edge)
            parent.drop(node)
            node = parent


def text_of(node: Node, above: Node | None = None) -> bytes:
    """The text that leads to ``node``, from ``above`` (default: the root) on. O(its length)."""
    edges = []
    while node.parent is not None and node is not above:
        edges.append(node.edge)
        node = node.parent
    edges.reverse()
    return b"".join(edges)


def prompt_end(response: Response) -> Node:
    """The node at which the prompt of ``response`` ends."""
    node = response.node
    while node.depth > response.start:
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent
    return node


def _covered(response: Response) -> Iterator[Node]:
    node = response.reach
    while node.depth > response.start:
        yield node
        assert node.parent is not None  # depth > start >= 0: not the root
        node = node.parent


def with_item(items: Row[_T], item: _T) -> Row[_T]:
    """``items`` and ``item``, the newest of them."""
    if isinstance(items, dict):
        items[item] = None
        return items
    return (*items, item) if len(items) < _MANY else dict.fromkeys((*items, item))


def without_item(items: Row[_T], item: _T) -> Row[_T]:
    """``items`` without ``item``, which is one of them."""
    if isinstance(items, dict):
        del items[item]
        return items
    slot = items.index(item)
    return items[:slot] + items[slot + 1 :]


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
