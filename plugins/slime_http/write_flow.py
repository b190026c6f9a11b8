"""Backpressure: writing waits for a client that reads slowly, and a client that reads too slowly is cut off."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys

__all__ = ["WriteFlow"]

logger = logging.getLogger(__name__)

#: Bytes of its answer that a slow client has to take within its timeout.
_MIN_TAKEN_BYTES = 64 * 1024
#: Fields of Linux's ``tcp_info``: segments without an acknowledgement, acknowledged bytes, and bytes not yet sent.
_TCP_INFO = struct.Struct("=24xI92xQ16xI")
_HAS_TCP_INFO = sys.platform == "linux"
_NO_LINGER = struct.pack("ii", 1, 0)


class WriteFlow:
    """The writing side of one connection. ``timeout_s``: time for a client to take 64 KiB, or all that is left.

    ``is_full``: the transport's buffer is full. No timer runs while the client reads as fast as the router writes.
    A transport with TLS does not count the bytes that it has encrypted, so the bytes that the client has acknowledged
    are read from the kernel.
    """

    __slots__ = (
        "_client", "_drained", "_loop", "_taken", "_timeout_s", "_timer", "_transport", "_unsent", "is_full",
    )  # fmt: skip

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        client: tuple[str, int] | None,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._client = client
        self._unsent = self._taken = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Event | None = None
        self.is_full = False

    def pause(self) -> None:
        """Mark the transport's buffer as full, and start the timer."""
        self.is_full = True
        self.expect_taken()

    def resume(self) -> None:
        """Let writers go on: the transport's buffer has room again."""
        self._open()
        if not self._transport.is_closing():
            self._cancel_timer()

    def end(self) -> None:
        """Let writers go on: the connection is lost."""
        self._open()
        self._cancel_timer()

    def _open(self) -> None:
        self.is_full = False
        if self._drained is not None:
            self._drained.set()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def drain(self) -> None:
        """Return when the client has taken enough of what was written, or has gone."""
        while self.is_full:
            if self._drained is None:
                self._drained = asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def expect_taken(self) -> None:
        """Start the timer: the client is cut off unless it takes enough within its timeout."""
        self._unsent = self._transport.get_write_buffer_size()
        self._taken, _ = self._acknowledged()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def reset(self) -> None:
        """Close by a TCP reset, so that the client cannot take a part of an answer for the whole."""
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def log_refusal(self, status: int, message: str) -> None:
        """Log that the server refuses the client's request."""
        logger.warning("%s: its request is refused (%d): %s", self._name, status, message)

    @property
    def _name(self) -> str:
        host, port = self._client or ("?", 0)
        return f"client {f'[{host}]' if ':' in host else host}:{port}"

    def _acknowledged(self) -> tuple[int, bool]:
        """Return how many bytes the client acknowledged, and True if none are outstanding; 0 and True if unknown."""
        if not _HAS_TCP_INFO:
            return 0, True
        sock = self._transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        unacked, taken, unsent = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))  # old kernels give less
        return taken, not (unacked or unsent)

    def _look(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        taken, has_all = self._acknowledged()
        if max(taken - self._taken, self._unsent - left) >= _MIN_TAKEN_BYTES:
            self.expect_taken()  # slow, but fast enough
            return
        if has_all and not left and self._transport.is_closing():
            self._transport.abort()  # the client has its answer, and only the close of TLS is missing
            return
        logger.warning(
            "%s: its connection is cut, since it took less than %d KiB of its answer in %g s (--client-timeout-secs)",
            self._name, _MIN_TAKEN_BYTES // 1024, self._timeout_s,
        )  # fmt: skip
        self.reset()
