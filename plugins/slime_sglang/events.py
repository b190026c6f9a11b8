"""Server-sent events in a stream of bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

__all__ = ["EventCutter", "EventSplitter", "data_in", "events_in", "last_end", "sequence_of"]

_ENDS = (b"\n\n", b"\n\r\n")
_DATA = b"data: "
_CR = 13
_INDEX = b',"index":'
#: Number of bytes at the end of an event that are searched for the number of its sequence.
_INDEX_BYTES = 20
_SEAM_BYTES = 2


def events_in(whole: bytes) -> list[bytes]:
    """Return the data of the events that end in ``whole``. Comments and other fields are left out."""
    if b"\r" in whole:
        whole = whole.replace(b"\r\n", b"\n")
    found, lines = [], []
    for line in whole.split(b"\n")[:-1]:  # a search for two bytes takes many times longer
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            found.append(b"\n".join(lines))
            lines = []
    return found


def data_in(event: bytes) -> memoryview:
    """Return the data of ``event``, which has one line and ends with a line feed."""
    return memoryview(event)[len(_DATA) : -2]


def last_end(data: bytes) -> int:
    """Return the offset of the end of the last event that ends in ``data``; 0 when none does."""
    end = data.rfind(b"\n") + 1
    if not end or data.endswith(_ENDS, 0, end):
        return end  # nearly always
    return max(data.rfind(each) + len(each) if each in data else 0 for each in _ENDS)


def sequence_of(event: bytes) -> int | None:
    """Return the number of the sequence of ``event``, if its JSON ends with this number, as SGLang's does; else None.

    ``event``: an event, or the data of one. A key right before the last brace surely belongs to the outermost object.
    """
    place = event.rfind(_INDEX, -_INDEX_BYTES)
    if place < 0:
        return None
    tail = event[place + len(_INDEX) :].rstrip(b"\n")
    return int(tail[:-1]) if tail.endswith(b"}") and tail[:-1].isdigit() else None


class EventCutter:
    """Cuts a stream of bytes into runs of whole events. A piece may end within an event, or hold several.

    ``is_torn``: bytes of an unfinished event wait.
    """

    def __init__(self) -> None:
        self._torn: list[bytes] = []
        self._seam = b""
        self.is_torn = False

    def feed(self, piece: bytes) -> bytes:
        """Return all bytes up to the end of the last event that ``piece`` completes. O(bytes)."""
        if not self._torn and piece.endswith(b"\n\n"):
            return piece  # nearly always
        self._torn.append(piece)
        self.is_torn = True
        seam = self._seam + piece
        self._seam = seam[-_SEAM_BYTES:]
        if not last_end(seam):
            return b""  # an event may be very long, so its pieces are joined only when it is complete
        data = self.rest()
        end = last_end(data)
        if end < len(data):
            self._torn = [data[end:]]
            self.is_torn = True
            self._seam = data[end:][-_SEAM_BYTES:]
        return data[:end]

    def rest(self) -> bytes:
        """Return the bytes of the unfinished event, and forget them."""
        rest = b"".join(self._torn)
        self._torn, self._seam, self.is_torn = [], b"", False
        return rest


class EventSplitter:
    """Cuts a stream of bytes into the data of its events. ``is_torn``: bytes of an unfinished event wait."""

    def __init__(self) -> None:
        self._cutter = EventCutter()
        self.is_torn = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that ``piece`` completes, as :func:`events_in` does. O(bytes)."""
        end = len(piece) - 2
        is_one = piece.find(b"\n") == end and piece.startswith(_DATA) and piece.endswith(b"\n\n")
        if is_one and piece[end - 1] != _CR and not self.is_torn:
            return [piece[len(_DATA) : end]]  # nearly always
        whole = self._cutter.feed(piece)
        self.is_torn = self._cutter.is_torn
        return events_in(whole) if whole else []
