"""A large answer that is passed on while it comes: its routed experts are decoded on the way, or dropped."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from io import BytesIO

from router_core.reply import BodySource
from slime_sglang.array_cutter import ArrayCutter

__all__ = ["RELAYED_BYTES", "RelayedAnswer"]

#: Smaller answers are read whole first: they are here at once, and may still be resumed.
RELAYED_BYTES = 1 << 20
#: Bytes in which a finish reason is looked for: SGLang writes it right behind text and ids.
_SEARCHED = 1 << 20
#: Bytes of a finish reason that tell which one it is.
_TELLING = 64
_ENDED = re.compile(rb'\{\s*"type":\s*"(?:stop|length)"')
_REASON = re.compile(rb'"finish_reason":\s*(?=[^\s])')  # within a string the quotes would be escaped


class RelayedAnswer:
    """The source of such an answer. ``record`` gets it cut by ``cutter``, before its last piece is passed on.

    Instead, ``lose`` is called where its end does not come, and ``fail`` with an exception of the cutter.
    """

    def __init__(
        self,
        source: BodySource,
        cutter: ArrayCutter,
        record: Callable[[ArrayCutter], Awaitable[None]],
        lose: Callable[[], object],
        fail: Callable[[Exception], object],
    ) -> None:
        self._source = source
        self._record = record
        self._lose: Callable[[], object] | None = lose
        self._fail = fail
        self._held = b""
        self._is_relayed = False
        self._cutter: ArrayCutter | None = cutter

    async def is_ended(self) -> bool:
        """True when its first bytes say that it came to its own end: it will not be resumed. Raises HTTPError."""
        held = BytesIO()
        while held.tell() < _SEARCHED and (piece := await self._source.read()):
            held.write(piece)
            self._held = held.getvalue()
            reason = _REASON.search(self._held)
            if reason is not None and len(self._held) > reason.end() + _TELLING:
                return _ENDED.match(self._held, reason.end()) is not None
        return False

    def relay(self) -> None:
        """Pass it on as it comes from now on. Else it is only read, and nothing of it is recorded here."""
        self._is_relayed = True

    @property
    def finished(self) -> bool:
        """See BodySource."""
        return not self._held and self._source.finished

    async def read(self) -> bytes:
        """See BodySource."""
        piece, self._held = self._held, b""
        if not piece:
            piece = await self._source.read()
        if self._is_relayed and self._cutter is not None:
            await self._cut(self._cutter, piece)
        return piece

    async def _cut(self, cutter: ArrayCutter, piece: bytes) -> None:
        try:
            cutter.feed(piece)
        except Exception as error:  # the client gets its answer all the same
            self._lose = self._cutter = None
            self._fail(error)
            return
        if not piece or self.finished:
            await self._record(cutter)
            self._lose = self._cutter = None

    def close(self) -> None:
        """See BodySource."""
        self._source.close()
        lose, self._lose = self._lose, None
        if self._is_relayed and lose is not None:
            lose()
        self._cutter = None
