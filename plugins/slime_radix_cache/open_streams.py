"""Streams that are still running: a client may act on what it was told before its stream has ended.

An agent that stops reading behind ``</search>`` asks for its next turn at once, and that request may be here
before the end of the old connection is noticed. What was streamed until then is recorded first.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["OpenStreams", "RunningStream"]


class RunningStream(Protocol):
    """A stream that can record what it has told so far."""

    def catch_up(self, prompt: bytes, session: str | None) -> None:
        """Do so if the client that asks with ``prompt`` may have read it."""
        ...

    def catch_up_session(self, session: str) -> None:
        """Do so if it is a stream of ``session``."""
        ...


class OpenStreams:
    """The streams that run now."""

    def __init__(self) -> None:
        self._running: dict[RunningStream, None] = {}

    def opened(self, stream: RunningStream) -> None:
        """``stream`` begins."""
        self._running[stream] = None

    def closed(self, stream: RunningStream) -> None:
        """``stream`` has ended."""
        del self._running[stream]

    def catch_up(self, prompt: bytes, session: str | None) -> None:
        """Record what a client that asks with ``prompt`` may have read of running streams. O(their number)."""
        for stream in list(self._running):
            stream.catch_up(prompt, session)

    def catch_up_session(self, session: str) -> None:
        """Record what the running streams of ``session`` have told so far. O(number of running streams)."""
        for stream in list(self._running):
            stream.catch_up_session(session)
