"""Events of a stream that one plugin has read, for another plugin whose tap gets the same stream next."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from router_core.exchange import Exchange
from router_core.reply import Reply

__all__ = ["EventReader", "Growth", "Reading", "reader_of", "tap_events"]

_NOTE = "sglang.event_reader"

#: The number of a sequence, and the text that an event adds to the sequence. The rest of the event is as in the
#: sequence's previous event, except what differs in each event, such as counts. It is not the sequence's last event.
Growth: TypeAlias = tuple[int, str]
#: What was read of an event: a Growth, or the parsed event, which nobody may change. None: read the event yourself.
Reading: TypeAlias = Growth | dict[str, Any] | None


class EventReader(Protocol):
    """A tap that reads the events of a stream before another plugin's tap gets them.

    A Growth adds to the previous event. So only a plugin that got the previous event, too, can use the Growth.
    """

    def feed(self, chunk: bytes) -> None:
        """See Tap."""
        ...

    def close(self, complete: bool) -> None:
        """See Tap."""
        ...

    def growth(self, piece: bytes) -> Growth | None:
        """Return the Growth if ``piece`` is exactly one event, and only adds text to the previous event; else None.

        ``piece``: the next piece of the stream, which the taps have not got yet.
        """
        ...

    def reading(self, number: int, data: bytes) -> Reading:
        """Return what was read of ``data``, the event with this ``number`` in the last piece that the taps got."""
        ...


def tap_events(exchange: Exchange, reply: Reply, reader: EventReader) -> None:
    """Let ``reader`` tap the ``reply`` of ``exchange``, and let :func:`reader_of` return it until ``exchange`` ends."""
    reply.tap(reader)
    exchange.notes[_NOTE] = reply, reader


def reader_of(exchange: Exchange, reply: Reply) -> EventReader | None:
    """Return the reader of ``reply``, the reply of ``exchange``; None if no tap of this reply reads events."""
    tapped, reader = exchange.notes.get(_NOTE, (None, None))
    return reader if tapped is reply else None
