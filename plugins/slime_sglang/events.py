"""Server-sent events, out of a stream of bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

__all__ = ["EventSplitter"]

_ENDS = (b"\n\n", b"\n\r\n")
_SEAM_BYTES = 2


class EventSplitter:
    """Cuts a stream of bytes into the data of its events; an event may be torn anywhere, or share a piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._seam = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that ``piece`` completes. Comments and other fields are left out. O(bytes)."""
        self._pieces.append(piece)
        seam = self._seam + piece
        self._seam = seam[-_SEAM_BYTES:]
        if not any(end in seam for end in _ENDS):
            return []  # an event may be very long: it is put together once
        data = b"".join(self._pieces)
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        self._pieces = [rest]
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found
