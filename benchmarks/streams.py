"""Many server-sent-event streams through a proxy, with both ends in this process and on one clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic, monotonic_ns
from typing import cast
from urllib.parse import urlsplit

import anyio
import httptools

from benchmarks.samples import Answer, Samples, request_body
from benchmarks.stand_in import STREAM_ID, Chunk, StandIn

__all__ = ["Pace", "Seen", "cumulative_chunks", "in_steps", "quantile_us", "spread", "streaming"]

#: Calls ``advance`` of a stand-in's streams, for ever.
Pace = Callable[[StandIn], Coroutine[object, object, None]]

_TICK_S = 0.001
_DONE = b"data: [DONE]"


def quantile_us(delays_ns: Sequence[int], share: float) -> float:
    """Return the quantile ``share`` of ``delays_ns`` in microseconds; NaN when there are none."""
    ordered = sorted(delays_ns)
    return ordered[int(share * (len(ordered) - 1))] / 1e3 if ordered else math.nan


@dataclass(slots=True)
class Seen:
    """Delays of the chunks that arrived at the clients, each from the worker's write to the client's read.

    ``first_ns``: the delays of the streams' first chunks. ``streams``: the number of streams that ended. ``faults``:
    wrong chunks, streams that ended too early or with another status than 200, and lost connections.
    """

    delays_ns: list[int] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)
    streams: int = 0
    faults: int = 0

    def clear(self) -> None:
        self.delays_ns.clear()
        self.first_ns.clear()
        self.streams = self.faults = 0


def spread(chunks_per_s: float) -> Pace:
    """Return a pace that writes chunks evenly over time and streams, even if earlier chunks have not arrived."""

    async def pace(stand_in: StandIn) -> None:
        sent, started, place = 0, monotonic(), 0
        while True:
            await anyio.sleep(_TICK_S)
            due = int((monotonic() - started) * chunks_per_s) - sent
            streams = list(stand_in.streams.values())
            for stream in islice(streams[place:] + streams[:place], due):
                stream.advance()
            sent, place = sent + due, (place + due) % max(1, len(streams))

    return pace


def in_steps(chunks_per_s: float) -> Pace:
    """Return a pace that writes a chunk of every stream at once, as the decode steps of a batching engine do."""

    async def pace(stand_in: StandIn) -> None:
        sent, started = 0, monotonic()
        while True:
            await anyio.sleep(_TICK_S)
            if (monotonic() - started) * chunks_per_s < sent + len(stand_in.streams):
                continue
            for stream in list(stand_in.streams.values()):
                stream.advance()
                sent += 1

    return pace


def cumulative_chunks(samples: Samples, answer: Answer, prompt_tokens: int) -> list[Chunk]:
    """Return ``answer`` as cumulative chunks of a stream, each with one more token. The text lacks the end token."""
    name, last = STREAM_ID.decode(), len(answer.ids)
    return [
        Chunk(answer.chunk(name, prompt_tokens, samples.decode(answer.ids[: min(count, last - 1)]), count))
        for count in range(1, last + 1)
    ]


@asynccontextmanager
async def streaming(
    url: str, stand_in: StandIn, chunks: Sequence[Chunk], *, streams: int, pace: Pace | None = None
) -> AsyncIterator[Seen]:
    """Keep ``streams`` streams open through ``url`` while the block runs, and count what arrives.

    Without a ``pace``, the next chunk of a stream is written when the previous chunk has arrived. Then each stream
    has one chunk in flight and no chunks are merged, so the rate is the most that the proxy can relay.
    """
    seen = Seen()

    def at_once(rid: bytes) -> None:
        if stream := stand_in.streams.get(rid):
            stream.advance()

    def later(rid: bytes) -> None:
        """Do nothing: ``pace`` advances the streams."""

    async with anyio.create_task_group() as tasks:
        clients = [_Client(number, seen, chunks, later if pace else at_once) for number in range(streams)]
        for client in clients:
            await client.connect(url)
        if pace:
            tasks.start_soon(pace, stand_in)
        try:
            yield seen
        finally:
            tasks.cancel_scope.cancel()
            for client in clients:
                client.hang_up()
            stand_in.streams.clear()


class _Client(asyncio.Protocol):
    """One stream after another on one connection. A chunk that is not the next one of its answer is a fault."""

    def __init__(
        self, number: int, seen: Seen, chunks: Sequence[Chunk], arrived: Callable[[bytes], None]
    ) -> None:
        self._number = number
        self._seen = seen
        self._sizes = [chunk.size_bytes - len(b"\n\n") for chunk in chunks]
        self._arrived = arrived
        self._parser = httptools.HttpResponseParser(self)
        self._turn = self._next = 0
        self._rid = self._rest = b""
        self._transport: asyncio.Transport | None = None

    async def connect(self, url: str) -> None:
        address = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, address.hostname or "", address.port or 80)

    def hang_up(self) -> None:
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._seen.faults += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        now = monotonic_ns()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event == _DONE:
                continue
            if self._next >= len(self._sizes) or len(event) != self._sizes[self._next]:
                self._seen.faults += 1
                continue
            delay_ns = now - Chunk.stamp_ns(event)
            self._seen.delays_ns.append(delay_ns)
            if not self._next:
                self._seen.first_ns.append(delay_ns)
            self._next += 1
            self._arrived(self._rid)

    def on_message_complete(self) -> None:
        self._seen.streams += 1
        self._seen.faults += self._next != len(self._sizes) or self._parser.get_status_code() != 200
        if self._transport:
            self._ask(self._transport)

    def _ask(self, transport: asyncio.Transport) -> None:
        self._turn += 1
        self._next, self._rest = 0, b""
        rid = f"stream-{self._number:04}-{self._turn:08}"  # as long as STREAM_ID
        self._rid = rid.encode()
        body = request_body("Once upon a time", len(self._sizes), stream=True, rid=rid)
        transport.write(
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
