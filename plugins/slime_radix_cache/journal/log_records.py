"""Records of the log of trajectories. The sizes are in tokens."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from slime_journal.record_files import LogKind
from slime_radix_cache.index.segments import Versions

__all__ = ["TRAJECTORIES", "Answered", "Asked", "Gone", "Record", "Seen"]


class Asked(NamedTuple):
    """A prompt segment was consumed: ``ids`` after the first ``kept`` tokens of segment ``parent`` (0: none).

    Its text is the first ``shared`` bytes of the parent's, and then ``text``. ``giver``: the sessions of
    the clients that gave the ids. ``doubt`` as in Segment. Earlier versions wrote neither.
    """

    serial: int
    parent: int
    kept: int
    shared: int
    text: bytes
    ids: bytes
    giver: tuple[str, ...] | None = None
    doubt: str | None = None

    @property
    def size(self) -> int:
        return len(self.ids) // 4


class Answered(NamedTuple):
    """A response was sampled; it begins at byte ``start`` of the text. The other fields are those of Asked and Sampled.

    ``parts``: the segments that are only a beginning of it.
    """

    serial: int
    parent: int
    kept: int
    shared: int
    text: bytes
    start: int
    ids: bytes
    logprobs: bytes | None
    visible: int
    tail: str
    versions: Versions
    finish_reason: str
    session: str | None
    doubt: str | None = None
    adapter: str | None = None
    parts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ids) // 4


class Gone(NamedTuple):
    """A segment of this ``size`` was evicted, or withdrawn since another segment has all of it.

    ``session``: the session that lost a response by it, which its marks record too; ``before``: the serial of its last
    response before that one (0: none is left).
    """

    serial: int
    size: int
    evicted: bool
    session: str | None
    before: int


class Seen(NamedTuple):
    """Weights with this version are served."""

    version: str


Record: TypeAlias = Asked | Answered | Gone | Seen

TRAJECTORIES = LogKind(
    name="trajectories",
    format="slime-router trajectories 1",
    adds=(Asked, Answered),
    removes=Gone,
    others=(Seen,),
    foreign="the tokens of another tokenizer",
)
