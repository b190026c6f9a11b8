"""Records of the log of trajectories. Each ``size`` is in tokens."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from slime_journal.record_files import LogKind
from slime_radix_cache.index.segments import Versions

__all__ = ["TRAJECTORIES", "Answered", "Asked", "Gone", "Record", "Seen"]


class Asked(NamedTuple):
    """A recorded prompt: ``ids`` after the first ``kept`` tokens of the segment ``parent`` (0: there is no segment).

    Its text is the first ``shared`` bytes of the parent's text, and then ``text``. ``giver``: the sessions that
    sent these ids. ``doubt``: as in Segment. Logs of earlier versions lack ``giver`` and ``doubt``.
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
    """A recorded response. It begins at byte ``start`` of the text. Other fields: see Asked and Sampled.

    ``parts``: serials of shorter records of the same response, each with only its beginning.
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
    """A removed segment: evicted, or withdrawn because another segment has all of its tokens.

    ``session``: the session that lost this response; the file of lost sessions marks this session, too. ``before``: the
    serial of the response before this one, of the same session (0: there is none).
    """

    serial: int
    size: int
    evicted: bool
    session: str | None
    before: int


class Seen(NamedTuple):
    """A weight version that engines serve."""

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
