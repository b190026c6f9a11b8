"""Publisher of KV events over ZeroMQ, with SGLang's frames. This module needs zmq, which is an extra.

A batch has three frames: the topic, the batch's number as 8 bytes in big-endian order, and msgpack ``[time, events,
rank]``. A subscriber requests a replay with an empty frame and the number of the first batch that it wants. The
publisher sends all batches that it still keeps, from that number on. It sends each batch as an empty frame, the number
and the msgpack. A last message ends the replay: an empty frame, the number -1 and an empty frame.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import zmq
import zmq.asyncio

from slime_engine.kv_events import Event, KVEventsConfig

__all__ = ["KVPublisher"]

_END = (-1).to_bytes(8, "big", signed=True)


class KVPublisher:
    """The publishers of all data-parallel ranks of an engine.

    They bind to their endpoint, with or without a wildcard in it. SGLang's publishers connect to an endpoint without a
    wildcard.
    """

    def __init__(self, ranks: Sequence[_RankPublisher]) -> None:
        self._ranks = ranks

    @classmethod
    @contextmanager
    def bound(cls, config: KVEventsConfig, dp_size: int) -> Iterator[KVPublisher]:
        """Bind the sockets until the block ends. Raises OSError if they cannot be bound."""
        context = zmq.asyncio.Context()
        try:
            try:
                ranks = [_RankPublisher(context, config.shifted(rank), rank) for rank in range(dp_size)]
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"kv_events_config: {error.strerror}") from None
            yield cls(ranks)
        finally:
            context.destroy(linger=0)

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Send a batch to all subscribers of ``rank``, without waiting: a slow subscriber misses batches."""
        self._ranks[rank].publish(events)

    async def serve_replays(self) -> None:
        """Answer requests for earlier batches until cancelled."""
        async with anyio.create_task_group() as tasks:
            for rank in self._ranks:
                tasks.start_soon(rank.serve_replays)


class _RankPublisher:
    def __init__(self, context: zmq.asyncio.Context, config: KVEventsConfig, rank: int) -> None:
        self._rank = rank
        self._topic = config.topic.encode()
        self._next = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.bind(config.endpoint)
        self._router: zmq.asyncio.Socket | None = None
        if config.replay_endpoint is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.set_hwm(0)  # no limit: a replay sends all its batches at once, and must lose none
            self._router.bind(config.replay_endpoint)

    def publish(self, events: Sequence[Event]) -> None:
        number, self._next = self._next.to_bytes(8, "big"), self._next + 1
        payload: bytes = msgpack.packb([time.time(), events, self._rank])
        # A PUB socket sends or drops a message at once, so there is nothing to await.
        self._pub.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))

    async def serve_replays(self) -> None:
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) == 3:  # other messages are not requests for a replay
                peer, _, first = frames
                for number, payload in [*self._sent]:
                    if number >= first:
                        await self._router.send_multipart((peer, b"", number, payload))
                await self._router.send_multipart((peer, b"", _END, b""))
