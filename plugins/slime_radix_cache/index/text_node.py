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

__all__ = ["NO_FORK", "Node"]

#: Depths as objects that all nodes share: an int takes 32 bytes. A deeper node has an int of its own; that is little
#: beside the 16 KiB or more of text before the node.
_DEPTHS = tuple(range(1 << 14))

#: The first bytes of several edges, followed by their nodes in the same order: one tuple is smaller than two.
#: ``Any``: mypy knows the type of an element only for a constant index.
Fork: TypeAlias = "tuple[Any, ...]"
NO_FORK: Fork = (b"",)


class Node:
    """A place in a text, ``depth`` bytes after its beginning. ``edge``: the bytes from ``parent`` to here.

    ``kid``: the only child, or None. ``fork``: several children. ``ended``: segments whose text ends here.
    ``passing``: responses whose text covers the edge or a part of it. If a text ends inside the edge, only these
    responses can have been cut there. ``begun``: responses whose prompt ends here: None, one response, a tuple of
    several, or many by session.
    """

    __slots__ = ("begun", "depth", "edge", "ended", "fork", "kid", "parent", "passing")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = _DEPTHS[depth] if depth < len(_DEPTHS) else depth
        self.kid: Node | None = None
        self.fork: Fork = NO_FORK
        self.ended: ItemSet[Segment] = None
        self.begun: Response | tuple[Response, ...] | dict[str | None, ItemSet[Response]] | None = None
        self.passing: ItemSet[Response] = None

    def kid_at(self, byte: int) -> Node | None:
        """Return the child whose edge begins with ``byte``, or None."""
        if self.kid is not None:
            return self.kid if self.kid.edge[0] == byte else None
        slot = self.fork[0].find(byte)
        return self.fork[slot + 1] if slot >= 0 else None

    @property
    def all_kids(self) -> tuple[Node, ...]:
        """All children."""
        return (self.kid,) if self.kid is not None else self.fork[1:]

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
        if isinstance(self.begun, dict):
            return items_of(self.begun.get(session))
        return tuple([response for response in self.begins if response.session == session])

    def begin(self, response: Response) -> None:
        """Add ``response``, whose prompt ends here."""
        if isinstance(self.begun, dict):
            self.begun[response.session] = with_item(self.begun.get(response.session), response)
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
        if not isinstance(self.begun, dict):
            rest = [one for one in self.begins if one is not response]
            self.begun = tuple(rest) if len(rest) > 1 else rest[0] if rest else None
            return
        own = without_item(self.begun.pop(response.session), response)
        if own is not None:
            self.begun[response.session] = own
        if not self.begun:
            self.begun = None

    def sort(self, place: Callable[[Segment], int]) -> None:
        """Put segments and responses in the order of ``place``, the highest last."""
        self.ended = sorted_set(self.ended, place)
        self.passing = sorted_set(self.passing, place)
        if isinstance(self.begun, dict):
            self.begun = {session: sorted_set(own, place) for session, own in self.begun.items()}
        elif isinstance(self.begun, tuple):
            self.begun = tuple(sorted(self.begun, key=place))

    def add(self, kid: Node) -> None:
        """Add ``kid``, whose edge begins with a new byte."""
        if self.kid is not None:
            self.fork = (_shared(self.kid.edge[:1] + kid.edge[:1]), self.kid, kid)
            self.kid = None
        elif self.fork is not NO_FORK:
            self.fork = (_shared(self.fork[0] + kid.edge[:1]), *self.fork[1:], kid)
        else:
            self.kid = kid

    def replace(self, old: Node, new: Node) -> None:
        """Put ``new``, whose edge begins with the same byte, in the place of ``old``."""
        if self.kid is old:
            self.kid = new
        else:
            self.fork = tuple([new if kid is old else kid for kid in self.fork])

    def drop(self, kid: Node) -> None:
        """Remove ``kid``."""
        if self.kid is kid:
            self.kid = None
            return
        kids = [one for one in self.fork[1:] if one is not kid]
        if len(kids) > 1:
            self.fork = (_shared(self.fork[0].replace(kid.edge[:1], b"")), *kids)
        else:
            [self.kid], self.fork = kids, NO_FORK


@lru_cache(1 << 12)
def _shared(keys: bytes) -> bytes:
    """Return one object for all equal ``keys``, which are frequent."""
    return keys
