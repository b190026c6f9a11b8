"""Bodies passed on from a decode worker's stream."""

from __future__ import annotations

from collections.abc import Callable

from router_core.reply import BodySource
from slime_pd.pd_merge import Prefilled
from slime_sglang.events import EventSplitter

__all__ = ["MergedStream", "Until"]


class Until:
    """A body whose ``first`` piece can be awaited; ``ended`` is called at its end, however it ends."""

    def __init__(self, source: BodySource, ended: Callable[[], object]) -> None:
        self._source = source
        self.first = b""
        self._ended = ended

    async def begin(self) -> None:
        """Return when the first piece is there. Raises HTTPError."""
        self.first = await self._source.read()

    @property
    def finished(self) -> bool:
        return not self.first and self._source.finished

    async def read(self) -> bytes:
        first, self.first = self.first, b""
        piece = first or await self._source.read()
        if self.finished or not piece:
            self._ended()
        return piece

    def close(self) -> None:
        self._source.close()
        self._ended()


class MergedStream:
    """The events of ``source``, each merged with the fields of the prefill worker."""

    def __init__(self, source: BodySource, prefilled: Prefilled) -> None:
        self._source = source
        self._prefilled = prefilled
        self._events = EventSplitter()

    @property
    def finished(self) -> bool:
        return self._source.finished

    async def read(self) -> bytes:
        while piece := await self._source.read():
            events = [self._prefilled.merge_event(data) for data in self._events.feed(piece)]
            if events:
                return b"".join(b"data: %b\n\n" % data for data in events)
        return b""

    def close(self) -> None:
        self._source.close()
