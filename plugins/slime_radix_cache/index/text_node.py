"""Nodes of the text index, with the segments that begin, end or pass there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from slime_radix_cache.index.item_sets import (
    MANY,
    Items,
    ItemSet,
    items_of,
    sorted_set,
    with_item,
    without_item,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from slime_radix_cache.index.segments import Response, Segment

__all__ = ["NO_KIDS", "Node"]

#: Depths as objects that all nodes share: an int takes 32 bytes. A deeper node has an int of its own; that is little
#: beside the 16 KiB or more of text before the node.
_DEPTHS = tuple(range(1 << 14))

#: The first bytes of several edges, followed by their nodes in the same order: one tuple is smaller than two.
#: ``Any``: mypy knows the type of an element only for a constant index.
Fork: TypeAlias = "tuple[Any, ...]"
NO_KIDS: Fork = (b"",)
#: No response, one, a tuple of several, or the sets of many responses by session. See Node.
Begun: TypeAlias = "Response | tuple[Response, ...] | dict[str | None, ItemSet[Response]] | None"


class NodeResponses:
    """``begun`` and ``passing`` of a node with several responses; see Node."""

    __slots__ = ("begun", "passing")

    def __init__(self, begun: Begun, passing: ItemSet[Response]) -> None:
        self.begun = begun
        self.passing = passing


class Node:
    """A place in a text, ``depth`` bytes after its beginning. ``edge``: the bytes from ``parent`` to here.

    ``kids``: the only child, or a fork of no or several children. ``ended``: segments whose text ends here.
    ``passing``: responses whose text covers the edge or a part of it. If a text ends inside the edge, only these
    responses can have been cut there. ``begun``: responses whose prompt ends here: None, one response, a tuple of
    several, or many by session. ``responses``: ``begun`` and ``passing`` in one object. Most nodes have only one
    response, which is kept without this object: its ``start`` tells whether it begins here or passes.
    """

    __slots__ = ("depth", "edge", "ended", "kids", "parent", "responses")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = _DEPTHS[depth] if depth < len(_DEPTHS) else depth
        self.kids: Node | Fork = NO_KIDS
        self.ended: ItemSet[Segment] = None
        self.responses: Response | NodeResponses | None = None

    @property
    def begun(self) -> Begun:
        """See Node."""
        kept = self.responses
        if kept is None or isinstance(kept, NodeResponses):
            return kept.begun if kept is not None else None
        return kept if kept.start == self.depth else None

    @begun.setter
    def begun(self, begun: Begun) -> None:
        self._keep(begun, self.passing)

    @property
    def passing(self) -> ItemSet[Response]:
        """See Node."""
        kept = self.responses
        if kept is None or isinstance(kept, NodeResponses):
            return kept.passing if kept is not None else None
        return kept if kept.start < self.depth else None

    @passing.setter
    def passing(self, passing: ItemSet[Response]) -> None:
        self._keep(self.begun, passing)

    def _keep(self, begun: Begun, passing: ItemSet[Response]) -> None:
        one = begun if passing is None else passing if begun is None else ()
        self.responses = NodeResponses(begun, passing) if isinstance(one, (tuple, dict)) else one

    def kid_at(self, byte: int) -> Node | None:
        """Return the child whose edge begins with ``byte``, or None."""
        kids = self.kids
        if isinstance(kids, Node):
            return kids if kids.edge[0] == byte else None
        slot = kids[0].find(byte)
        return kids[slot + 1] if slot >= 0 else None

    @property
    def all_kids(self) -> tuple[Node, ...]:
        """All children."""
        return self.kids[1:] if isinstance(self.kids, tuple) else (self.kids,)

    @property
    def ends(self) -> Items[Segment]:
        """Segments whose text ends here, newest last."""
        return items_of(self.ended)

    @property
    def through(self) -> Items[Response]:
        """Responses whose text covers the edge or a part of it, newest last."""
        return items_of(self.passing)

    @property
    def begins(self) -> tuple[Response, ...]:
        """Responses whose prompt ends here; within each session the newest is last."""
        begun = self.begun
        if isinstance(begun, dict):
            return tuple(response for some in begun.values() for response in items_of(some))
        return () if begun is None else begun if isinstance(begun, tuple) else (begun,)

    def begun_by(self, session: str) -> Items[Response]:
        """Return the responses of ``session`` in ``begins``. O(their number + MANY)."""
        begun = self.begun
        if isinstance(begun, dict):
            return items_of(begun.get(session))
        return tuple([response for response in self.begins if response.session == session])

    def begin(self, response: Response) -> None:
        """Add ``response``, whose prompt ends here."""
        begun = self.begun
        if isinstance(begun, dict):
            begun[response.session] = with_item(begun.get(response.session), response)
            return
        known = self.begins
        if len(known) < MANY:
            self.begun = (*known, response) if known else response
            return
        self.begun = {}
        for one in (*known, response):
            self.begin(one)

    def unbegin(self, response: Response) -> None:
        """Undo :meth:`begin`."""
        begun = self.begun
        if not isinstance(begun, dict):
            rest = [one for one in self.begins if one is not response]
            self.begun = tuple(rest) if len(rest) > 1 else rest[0] if rest else None
            return
        own = without_item(begun.pop(response.session), response)
        if own is not None:
            begun[response.session] = own
        if not begun:
            self.begun = None

    def sort(self, place: Callable[[Segment], int]) -> None:
        """Put segments and responses in the order of ``place``, the highest last."""
        self.ended = sorted_set(self.ended, place)
        self.passing = sorted_set(self.passing, place)
        begun = self.begun
        if isinstance(begun, dict):
            self.begun = {session: sorted_set(own, place) for session, own in begun.items()}
        elif isinstance(begun, tuple):
            self.begun = tuple(sorted(begun, key=place))

    def add(self, kid: Node) -> None:
        """Add ``kid``, whose edge begins with a new byte."""
        kids = self.kids
        if kids is NO_KIDS:
            self.kids = kid
        elif isinstance(kids, tuple):
            self.kids = (_shared(kids[0] + kid.edge[:1]), *kids[1:], kid)
        else:
            self.kids = (_shared(kids.edge[:1] + kid.edge[:1]), kids, kid)

    def replace(self, old: Node, new: Node) -> None:
        """Put ``new``, whose edge begins with the same byte, in the place of ``old``."""
        kids = self.kids
        self.kids = tuple([new if kid is old else kid for kid in kids]) if isinstance(kids, tuple) else new

    def drop(self, kid: Node) -> None:
        """Remove ``kid``."""
        kids = self.kids
        if not isinstance(kids, tuple):
            self.kids = NO_KIDS
            return
        rest = [one for one in kids[1:] if one is not kid]
        self.kids = (_shared(kids[0].replace(kid.edge[:1], b"")), *rest) if len(rest) > 1 else rest[0]


@lru_cache(1 << 12)
def _shared(keys: bytes) -> bytes:
    """Return one object for all equal ``keys``, which are frequent."""
    return keys
