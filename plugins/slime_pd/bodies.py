"""Bodies that pass on the stream of a decode worker."""

from __future__ import annotations

from router_core.reply import BodySource
from slime_pd.pd_merge import Prefilled
from slime_sglang.events import EventSplitter

__all__ = ["FirstPiece", "MergedStream"]


class FirstPiece:
    """A body whose ``first`` piece can be awaited."""

    def __init__(self, source: BodySource) -> None:
        self._source = source
        self.first = b""

    async def begin(self) -> None:
        """Return when the first piece is there. Raises HTTPError."""
        self.first = await self._source.read()

    @property
    def finished(self) -> bool:
        return not self.first and self._source.finished

    async def read(self) -> bytes:
        first, self.first = self.first, b""
        return first or await self._source.read()

    def close(self) -> None:
        self._source.close()


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
