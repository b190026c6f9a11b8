"""Running streams: a client may continue the text of a stream before the stream has ended.

An agent that stops reading after ``</search>`` sends its next turn at once. The router may get that request before it
sees the disconnect. So the router first records the part that was streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from slime_radix_cache.index.segments import Response

__all__ = ["OpenStreams", "RunningStream"]


class RunningStream(Protocol):
    """A stream that can record what it passed on so far."""

    session: str | None

    def catch_up(self, prompt: bytes) -> None:
        """Record what was passed on so far, if the client that sends ``prompt`` may have read it."""
        ...

    def record_all(self) -> None:
        """Record what was passed on so far."""
        ...

    def is_sampling(self, response: Response) -> bool:
        """Return True if ``response`` is what was recorded so far of one of the stream's sequences."""
        ...


class OpenStreams:
    """The running streams, by session."""

    def __init__(self) -> None:
        self._running: dict[str | None, dict[RunningStream, None]] = {}

    def opened(self, stream: RunningStream) -> None:
        """Add ``stream``, which begins."""
        self._running.setdefault(stream.session, {})[stream] = None

    def closed(self, stream: RunningStream) -> None:
        """Remove ``stream``, which has ended."""
        own = self._running[stream.session]
        del own[stream]
        if not own:
            del self._running[stream.session]

    def catch_up(self, prompt: bytes, session: str | None) -> None:
        """Record what running streams passed on so far, if the client that sends ``prompt`` may have read it.

        O(streams of ``session`` and streams without a session); O(all streams) if ``session`` is None.
        """
        sessions = list(self._running) if session is None else [session, None]
        for one in sessions:
            for stream in self._of(one):
                stream.catch_up(prompt)

    def catch_up_session(self, session: str) -> None:
        """Record what the running streams of ``session`` passed on so far."""
        for stream in self._of(session):
            stream.record_all()

    def are_sampling(self, response: Response) -> bool:
        """Return True if a running stream may add tokens to ``response``. O(streams of its session)."""
        return any(stream.is_sampling(response) for stream in self._of(response.session))

    def _of(self, session: str | None) -> Iterator[RunningStream]:
        return iter(list(self._running.get(session, ())))
