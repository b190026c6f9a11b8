"""A large answer that is passed on while it comes, and recorded just before its last piece is passed on.

The answer is parsed to be recorded. Arrays such as the routed experts are cut out before it is parsed; see ArrayCutter.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from io import BytesIO

from router_core.reply import BodySource
from slime_sglang.array_cutter import ArrayCutter

__all__ = ["RELAYED_BYTES", "RelayedAnswer"]

#: Smaller answers are read whole before they are passed on: they arrive at once, and may still be resumed.
RELAYED_BYTES = 1 << 20
#: The finish reason is looked for in about this many bytes at the beginning of the body: SGLang writes it right after
#: the text and the ids.
_SEARCHED = 1 << 20
#: Bytes of a finish reason that are enough to read its type.
_TELLING = 64
_ENDED = re.compile(rb'\{\s*"type":\s*"(?:stop|length)"')
_REASON = re.compile(rb'"finish_reason":\s*(?=[^\s])')  # within a string the quotes would be escaped


class RelayedAnswer:
    """The body of one large answer, read from ``source``. See :meth:`relay`.

    ``record(cutter)`` is called when ``cutter`` has the whole body, before the last piece is passed on. If this call is
    cancelled, ``record`` marks the answer as lost. If the end of the body does not come, ``lose()`` is called instead.
    If the cutter raises an exception, ``fail`` is called with that exception.
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
        """Return True if the first bytes have the finish reason "stop" or "length": then the answer is not resumed.

        Raises HTTPError.
        """
        held = BytesIO()
        while held.tell() < _SEARCHED and (piece := await self._source.read()):
            held.write(piece)
            self._held = held.getvalue()
            reason = _REASON.search(self._held)
            if reason is not None and len(self._held) > reason.end() + _TELLING:
                return _ENDED.match(self._held, reason.end()) is not None
        return False

    def relay(self) -> None:
        """Begin to record the answer while it is passed on. Without this call, :meth:`read` only returns its bytes."""
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
        except Exception as error:  # recording stops, but the client still gets its answer
            self._lose = self._cutter = None
            self._fail(error)
            return
        if not piece or self.finished:
            self._lose = self._cutter = None
            await self._record(cutter)

    def close(self) -> None:
        """See BodySource."""
        self._source.close()
        lose, self._lose = self._lose, None
        if self._is_relayed and lose is not None:
            lose()
        self._cutter = None
