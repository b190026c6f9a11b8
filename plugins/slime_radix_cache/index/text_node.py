"""Nodes of the text index, with the segments that begin, end or pass there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_radix_cache.index.rows import MANY, Items, Row, items_of, with_item, without_item

if TYPE_CHECKING:
    from slime_radix_cache.index.segments import Response, Segment

__all__ = ["Node"]


class Node:
    """A place in a text, ``depth`` bytes after its beginning. ``edge``: the bytes from ``parent`` to here.

    ``kid``: the only child, or None. Of several children, the edge to ``kids[i]`` begins with the byte ``keys[i]``.
    ``ended``: segments whose text ends here. ``passing``: responses whose text covers a part of the edge; only they can
    be cut inside it. ``begun``: responses whose prompt ends here, as a row, or many by session.
    """

    __slots__ = ("begun", "depth", "edge", "ended", "keys", "kid", "kids", "parent", "passing")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.kid: Node | None = None
        self.keys = b""
        self.kids: tuple[Node, ...] = ()
        self.ended: Row[Segment] = None
        self.begun: Response | tuple[Response, ...] | dict[str | None, Row[Response]] | None = None
        self.passing: Row[Response] = None

    def kid_at(self, byte: int) -> Node | None:
        """Return the child whose edge begins with ``byte``, or None."""
        if self.kid is not None:
            return self.kid if self.kid.edge[0] == byte else None
        slot = self.keys.find(byte)
        return self.kids[slot] if slot >= 0 else None

    @property
    def all_kids(self) -> tuple[Node, ...]:
        """All children."""
        return (self.kid,) if self.kid is not None else self.kids

    @property
    def ends(self) -> Items[Segment]:
        """Segments whose text ends here, newest last."""
        return items_of(self.ended)

    @property
    def through(self) -> Items[Response]:
        """Responses whose text covers a part of the edge, newest last."""
        return items_of(self.passing)

    @property
    def begins(self) -> tuple[Response, ...]:
        """Responses whose prompt ends here; within each session the newest is last."""
        begun = self.begun
        if isinstance(begun, dict):
            return tuple(response for some in begun.values() for response in items_of(some))
        return () if begun is None else begun if isinstance(begun, tuple) else (begun,)

    def begun_by(self, session: str) -> Items[Response]:
        """Return the responses of ``session`` in ``begins``. O(their number), and at most MANY others."""
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

    def add(self, kid: Node) -> None:
        """Add ``kid``, whose edge begins with a new byte."""
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
        """Put ``new``, whose edge begins with the same byte, in the place of ``old``."""
        if self.kid is old:
            self.kid = new
        else:
            slot = self.keys.index(old.edge[0])
            self.kids = (*self.kids[:slot], new, *self.kids[slot + 1 :])

    def drop(self, kid: Node) -> None:
        """Remove ``kid``."""
        if self.kid is kid:
            self.kid = None
            return
        slot = self.keys.index(kid.edge[0])
        self.keys = self.keys[:slot] + self.keys[slot + 1 :]
        self.kids = self.kids[:slot] + self.kids[slot + 1 :]
        if len(self.kids) == 1:
            [self.kid] = self.kids
            self.keys, self.kids = b"", ()
