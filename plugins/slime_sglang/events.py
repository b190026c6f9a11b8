"""Server-sent events in a stream of bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

__all__ = ["EventCutter", "EventSplitter", "events_in", "last_end"]

_ENDS = (b"\n\n", b"\n\r\n")
_DATA = b"data: "
_SEAM_BYTES = 2


def events_in(whole: bytes) -> list[bytes]:
    """Return the data of the events that end in ``whole``. Comments and other fields are left out."""
    if b"\r" in whole:
        whole = whole.replace(b"\r\n", b"\n")
    found = []
    for event in whole.split(b"\n\n")[:-1]:
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            found.append(b"\n".join(lines))
    return found


def last_end(data: bytes) -> int:
    """Return the offset of the end of the last event that ends in ``data``; 0 when none does."""
    return max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)


class EventCutter:
    """Cuts a stream of bytes into runs of whole events. A piece may end within an event, or hold several."""

    def __init__(self) -> None:
        self._torn: list[bytes] = []
        self._seam = b""

    @property
    def is_torn(self) -> bool:
        """True while bytes of an unfinished event wait."""
        return bool(self._torn)

    def feed(self, piece: bytes) -> bytes:
        """Return all bytes up to the end of the last event that ``piece`` completes. O(bytes)."""
        if not self._torn and piece.endswith(_ENDS[0]):
            return piece  # nearly always
        self._torn.append(piece)
        seam = self._seam + piece
        self._seam = seam[-_SEAM_BYTES:]
        if not any(end in seam for end in _ENDS):
            return b""  # an event may be very long, so its pieces are joined only when it is complete
        data = self.rest()
        end = last_end(data)
        if end < len(data):
            self._torn = [data[end:]]
            self._seam = data[end:][-_SEAM_BYTES:]
        return data[:end]

    def rest(self) -> bytes:
        """Return the bytes of the unfinished event, and forget them."""
        rest = b"".join(self._torn)
        self._torn, self._seam = [], b""
        return rest


class EventSplitter:
    """Cuts a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._cutter = EventCutter()

    def only_event(self, piece: bytes) -> bytes | None:
        """Return the data of the event if ``piece`` is exactly one event of one line, else None. Changes nothing."""
        is_line = piece.find(b"\n") == len(piece) - 2 and piece.endswith(_ENDS[0]) and piece[-3:-2] != b"\r"
        if is_line and piece.startswith(_DATA) and not self._cutter.is_torn:
            return piece[len(_DATA) : -2]
        return None

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that ``piece`` completes, as :func:`events_in` does. O(bytes)."""
        data = self.only_event(piece)
        if data is not None:
            return [data]  # nearly always
        whole = self._cutter.feed(piece)
        return events_in(whole) if whole else []
