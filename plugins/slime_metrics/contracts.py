"""The components that this plugin offers to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

__all__ = ["Metrics", "Read", "Totals", "Traffic"]

#: Returns a metric's value; None: there is no value now. For a metric with labels, returns a mapping. Each key is the
#: value of the one label, or the pair of the values of two labels.
Read: TypeAlias = Callable[[], "float | Mapping[str, float] | Mapping[tuple[str, str], float] | None"]


class Metrics(Protocol):
    """The router's metrics; the component ``"metrics"``, which other plugins find in their ``setup``.

    ``read`` is called for each scrape, on the event loop. So while a request is served, a plugin only has to update
    plain numbers. Beyond 1,000 combinations of labels, the numbers of all further combinations are summed as ``other``.
    """

    def gauge(self, name: str, help: str, read: Read, labels: Sequence[str] = ()) -> None:
        """Add a number that rises and falls. Raises PluginError for a name that is taken or invalid."""
        ...

    def counter(self, name: str, help: str, read: Read, labels: Sequence[str] = ()) -> None:
        """Add a number that only rises; its ``name`` ends in ``_total``. Raises PluginError, as :meth:`gauge`."""
        ...

    def numbers(self, name: str) -> float | Mapping[str, float] | Mapping[tuple[str, str], float] | None:
        """Return the present numbers of a metric that :meth:`gauge` or :meth:`counter` added; None: there are none.

        If ``read`` raises, the result is None too, and the log has the traceback. Call this on the event loop.
        """
        ...


class Totals(NamedTuple):
    """Generations that have ended since the start, of all paths and workers.

    ``by_class``: their number by the first digit of the status. ``incomplete``: by the same digit, the number of those
    whose answer broke off, or failed after its head was sent. ``bounds``: upper bounds of durations in seconds.
    ``whole``: the numbers of durations to the end of the answer, one for each bound and one for all longer durations.
    ``first_byte``: the numbers of durations to the first byte of a streamed answer.
    """

    by_class: Mapping[int, int]
    incomplete: Mapping[int, int]
    bounds: Sequence[float]
    whole: Sequence[int]
    first_byte: Sequence[int]


class Traffic(Protocol):
    """The traffic of the router; the component ``"traffic"``."""

    def totals(self) -> Totals:
        """Return the present totals. O(combinations of labels). Call this on the event loop."""
        ...
