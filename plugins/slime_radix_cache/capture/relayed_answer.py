"""A large answer that is passed on while it comes: of its routed experts nothing is kept."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from io import BytesIO

from router_core.reply import BodySource
from slime_sglang.bodies import EXPERTS

__all__ = ["RELAYED_BYTES", "RelayedAnswer", "WithoutExperts"]

#: Smaller answers are read whole first: they are here at once, and may still be resumed.
RELAYED_BYTES = 1 << 20
#: Bytes in which a finish reason is looked for: SGLang writes it right behind text and ids.
_SEARCHED = 1 << 20
#: Bytes of a finish reason that tell which one it is.
_TELLING = 64
_ENDED = re.compile(rb'\{\s*"type":\s*"(?:stop|length)"')
_REASON = re.compile(rb'"finish_reason":\s*(?=[^\s])')  # within a string the quotes would be escaped
_SPACE = b" \t\r\n"


class RelayedAnswer:
    """The source of such an answer. ``record`` gets it without its experts, before its last piece is passed on.

    ``lose`` is called instead where its end does not come.
    """

    def __init__(
        self, source: BodySource, record: Callable[[bytes], Awaitable[None]], lose: Callable[[], object]
    ) -> None:
        self._source = source
        self._record = record
        self._lose: Callable[[], object] | None = lose
        self._held = b""
        self._is_relayed = False
        self._kept = WithoutExperts()

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
        if self._is_relayed and self._lose is not None:
            self._kept.feed(piece)
            if not piece or self.finished:
                await self._record(self._kept.whole())
                self._lose = None
        return piece

    def close(self) -> None:
        """See BodySource."""
        self._source.close()
        lose, self._lose = self._lose, None
        if self._is_relayed and lose is not None:
            lose()
        self._kept = WithoutExperts()


class WithoutExperts:
    """JSON in pieces, with empty strings in the place of the values of ``routed_experts``."""

    def __init__(self) -> None:
        self._kept = BytesIO()
        self._rest = b""
        self._is_inside = False

    def feed(self, piece: bytes) -> None:
        """Take the next bytes."""
        piece, self._rest = self._rest + piece if self._rest else piece, b""
        position = 0
        while position < len(piece):
            if self._is_inside:
                position = piece.find(b'"', position)  # base64 has no escapes
                if position < 0:
                    return
                self._is_inside = False
            name = piece.find(EXPERTS, position)
            if name < 0:
                end = max(position, len(piece) - len(EXPERTS))
                self._keep(piece, position, end)
                self._rest = piece[end:]
                return
            value = name + len(EXPERTS)
            start = piece.find(b'"', value)
            if piece[value : start if start >= 0 else None].strip(_SPACE):  # no string
                self._keep(piece, position, value)
                position = value
            elif start < 0:
                self._keep(piece, position, name)
                self._rest = piece[name:]
                return
            else:
                self._keep(piece, position, start + 1)
                position, self._is_inside = start + 1, True

    def _keep(self, piece: bytes, start: int, end: int) -> None:
        self._kept.write(memoryview(piece)[start:end])

    def whole(self) -> bytes:
        """All of it."""
        self._kept.write(self._rest)
        self._rest = b""
        return self._kept.getvalue()
