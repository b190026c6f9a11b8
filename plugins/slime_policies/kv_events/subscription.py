"""Connection to the publisher of one worker or rank. This module needs zmq, which is an extra."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import zmq
import zmq.asyncio
from anyio.lowlevel import checkpoint
from zmq.utils.monitor import recv_monitor_message

from slime_policies.kv_events.publisher import Publisher
from slime_policies.kv_events.stream import EventStream, Tally

__all__ = ["Subscription"]

logger = logging.getLogger(__name__)

#: After this time without a batch, the router requests a replay, since the last batches may be lost.
_QUIET_MS = 10_000
#: A replay has failed when nothing comes for this time. SGLang checks for replay requests ten times a second.
_REPLAY_MS = 5_000
#: The most replays in a row. One replay may not be enough: a publisher drops some batches of a replay that is too
#: large.
_REPLAYS = 100
_CONNECT_MS = 5_000
#: A connection that is not made in this time is given up: a peer may accept it and never answer.
_HANDSHAKE_MS = 10_000
_HEARTBEAT_MS = 10_000
_MAX_BYTES = 64 << 20
#: The most batches that wait in the router's socket. Further batches fill the publisher's queue. When this queue is
#: full, the publisher drops batches.
_MAX_WAITING = 100_000
#: Events that are applied before other tasks get a turn.
_EVENTS_AT_ONCE = 100
_NUMBER = 8
_END = (-1).to_bytes(_NUMBER, "big", signed=True)
#: States of the connection that are watched. All states but the first mean that the connection has ended.
_STATES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Subscription:
    """One TCP connection to a publisher. It ends when the engine ends; a Subscription does not reconnect."""

    def __init__(
        self, context: zmq.asyncio.Context, publisher: Publisher, stream: EventStream, tally: Tally
    ) -> None:
        self._context = context
        self._publisher = publisher
        self._stream = stream
        self._tally = tally

    async def follow(self) -> None:
        """Apply the batches of the publisher until the connection ends, or return when no connection can be made.

        Raises TimeoutError, in an ExceptionGroup, for a connection that is not made in time.
        """
        with self._socket(zmq.SUB) as sub:
            monitor = sub.get_monitor_socket(_STATES)
            try:
                sub.subscribe(self._publisher.topic)
                sub.connect(self._publisher.endpoint)
                async with anyio.create_task_group() as tasks:
                    is_connected = anyio.Event()
                    tasks.start_soon(_watch, monitor, is_connected, tasks.cancel_scope)
                    with anyio.fail_after(_HANDSHAKE_MS / 1000):
                        await is_connected.wait()
                    await self._replay()  # batches from before the connection
                    await self._read(sub)
                self._stream.end()
            finally:
                sub.disable_monitor()
                monitor.close(linger=0)
                self._stream.forget()

    async def _read(self, sub: zmq.asyncio.Socket) -> None:
        quiet_ms = None if self._publisher.replay is None else _QUIET_MS
        while True:
            if not await sub.poll(quiet_ms):
                await self._replay()  # if the last batch was lost, no later batch has shown the gap
                continue
            frames = await sub.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != _NUMBER:
                self._tally.malformed += 1
                await checkpoint()
                continue
            number = int.from_bytes(frames[1], "big")
            if self._stream.note_live(number):
                await self._replay()
            await self._apply(number, frames[2])

    async def _apply(self, number: int, payload: bytes) -> None:
        for count, _ in enumerate(self._stream.apply(number, payload)):
            if count % _EVENTS_AT_ONCE == 0:
                await checkpoint()

    async def _replay(self) -> None:
        """Request replays from the next batch on, until one fails or brings nothing new."""
        if self._publisher.replay is None:
            return
        for _ in range(_REPLAYS):
            first = self._stream.next
            with self._socket(zmq.DEALER) as dealer:
                dealer.connect(self._publisher.replay)
                await dealer.send_multipart((b"", first.to_bytes(_NUMBER, "big")))
                if not await self._apply_replay(dealer, first) or self._stream.next == first:
                    return

    async def _apply_replay(self, dealer: zmq.asyncio.Socket, first: int) -> bool:
        """Apply the replay from batch ``first`` on, up to a gap inside it. Return True when the mark of its end came.

        Return False when a message is malformed, or when nothing more comes.
        """
        while await dealer.poll(_REPLAY_MS):
            frames = await dealer.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != _NUMBER:
                self._tally.malformed += 1
                return False
            if frames[-2] == _END:
                return True
            number = int.from_bytes(frames[-2], "big")
            # If the replay begins with a gap, the publisher no longer has the batches in the gap. If a gap comes later,
            # the publisher has its batches, but has dropped them from this replay. Another replay can bring them.
            if number <= self._stream.next or self._stream.next == first:
                self._tally.replayed += 1
                await self._apply(number, frames[-1])
        logger.debug("no replay of KV events from %s", self._publisher.replay)
        return False

    @contextmanager
    def _socket(self, kind: int) -> Iterator[zmq.asyncio.Socket]:
        socket = self._context.socket(kind)
        try:
            socket.set(zmq.RECONNECT_IVL, -1)
            socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.set(zmq.MAXMSGSIZE, _MAX_BYTES)
            socket.set(zmq.RCVHWM, _MAX_WAITING)
            socket.set(zmq.IPV6, int("[" in self._publisher.endpoint))
            yield socket
        finally:
            socket.close(linger=0)


async def _watch(monitor: zmq.asyncio.Socket, is_connected: anyio.Event, scope: anyio.CancelScope) -> None:
    """Set ``is_connected`` when the connection is made, and cancel ``scope`` when the connection ends."""
    while (await recv_monitor_message(monitor))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        is_connected.set()
    scope.cancel()
