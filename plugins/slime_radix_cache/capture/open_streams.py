"""Streams that are still running: a client may act on what it was told before its stream has ended.

An agent that stops reading behind ``</search>`` asks for its next turn at once. That request may be here before the
end of the old connection is noticed. What was streamed until then is recorded first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

__all__ = ["OpenStreams", "RunningStream"]


class RunningStream(Protocol):
    """A stream that can record what it has told so far."""

    session: str | None

    def catch_up(self, prompt: bytes) -> None:
        """Do so if a client that asks with ``prompt`` may have read it."""
        ...

    def record_all(self) -> None:
        """Do so."""
        ...


class OpenStreams:
    """The streams that run now, by their sessions."""

    def __init__(self) -> None:
        self._running: dict[str | None, dict[RunningStream, None]] = {}

    def opened(self, stream: RunningStream) -> None:
        """``stream`` begins."""
        self._running.setdefault(stream.session, {})[stream] = None

    def closed(self, stream: RunningStream) -> None:
        """``stream`` has ended."""
        own = self._running[stream.session]
        del own[stream]
        if not own:
            del self._running[stream.session]

    def catch_up(self, prompt: bytes, session: str | None) -> None:
        """Record what a client that asks with ``prompt`` may have read of running streams.

        O(streams of the session, and those without one); of all, when the client names no session.
        """
        sessions = list(self._running) if session is None else [session, None]
        for one in sessions:
            for stream in self._of(one):
                stream.catch_up(prompt)

    def catch_up_session(self, session: str) -> None:
        """Record what the running streams of ``session`` have told so far."""
        for stream in self._of(session):
            stream.record_all()

    def _of(self, session: str | None) -> Iterator[RunningStream]:
        return iter(list(self._running.get(session, ())))
