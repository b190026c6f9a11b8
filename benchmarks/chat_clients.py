"""Clients of ``/v1/chat/completions``. Each client sends its next request as soon as it has read the whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from time import monotonic_ns
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import httptools
import orjson

from benchmarks.chat_worker import NAME
from benchmarks.stand_in import StandIn
from benchmarks.streams import Pace

__all__ = ["Asked", "Seen", "Talk", "chatting"]

_UNIQUE = "@unique@"
_DONE = b"data: [DONE]"
_NUMBERS = count()
_APART_S = 0.005
_BEGINNING_S = 30.0


class Talk:
    """A conversation. Its last question contains the name of the request, so no two requests are equal."""

    def __init__(self, messages: Sequence[dict[str, str]], max_tokens: int) -> None:
        *others, last = messages
        question = {**last, "content": f"{last['content']} {NAME.format(_UNIQUE)}"}
        body = {
            "model": "stand-in",
            "messages": [*others, question],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "rid": _UNIQUE,
        }
        self._bodies = {
            stream: json.dumps({**body, "stream": stream}, separators=(",", ":"))
            .encode()
            .split(_UNIQUE.encode())
            for stream in (False, True)
        }

    def body(self, name: bytes, *, stream: bool) -> bytes:
        """Return the body of the request called ``name``."""
        return name.join(self._bodies[stream])


@dataclass(frozen=True, slots=True)
class Asked:
    """The conversations (``talks``), which each client continues in turn, and the texts of all correct ``answers``."""

    talks: list[Talk]
    answers: Collection[str]


@dataclass(slots=True)
class Seen:
    """Nanoseconds from a request to the ``first`` words of a stream, and to the end of an answer (``took``).

    ``chunks``: the number of stream chunks with text or a finish reason. ``faults``: wrong answers and lost
    connections.
    """

    first_ns: list[int] = field(default_factory=list)
    took_ns: list[int] = field(default_factory=list)
    chunks: int = 0
    faults: int = 0

    def clear(self) -> None:
        self.first_ns.clear()
        self.took_ns.clear()
        self.chunks = self.faults = 0


@asynccontextmanager
async def chatting(
    url: str, worker: StandIn, asked: Asked, *, clients: int, stream: bool, pace: Pace | None = None
) -> AsyncIterator[Seen]:
    """Keep ``clients`` clients busy while the block runs.

    Without a ``pace``, the next chunk of a stream leaves the worker when the client has read the previous chunk.
    """
    seen = Seen()

    def at_once(name: bytes) -> None:
        if stream := worker.streams.get(name):
            stream.advance()

    def later(name: bytes) -> None:
        """Do nothing: ``pace`` advances the streams."""

    async with anyio.create_task_group() as tasks:
        arrived = later if pace else at_once
        all_clients = [_Client(number, asked, stream, seen, arrived) for number in range(clients)]
        for client in all_clients:
            await client.connect(url)
            if pace:
                await _drive_apart(worker)
        if pace:
            tasks.start_soon(pace, worker)
        with anyio.fail_after(_BEGINNING_S):
            for client in all_clients:
                await client.heard.wait()  # a busy event loop accepts only one connection per iteration
        try:
            yield seen
        finally:
            tasks.cancel_scope.cancel()
            for client in all_clients:
                client.hang_up()
            worker.streams.clear()


async def _drive_apart(worker: StandIn) -> None:
    """Advance the streams that have begun, so that streams do not all begin and end in the same moment."""
    await anyio.sleep(_APART_S)
    for stream in list(worker.streams.values()):
        stream.advance()


class _Client(asyncio.Protocol):
    """One request after another on one connection. Each request continues the next conversation.

    ``heard`` is set when the body of the first answer has begun.
    """

    def __init__(
        self, number: int, asked: Asked, stream: bool, seen: Seen, arrived: Callable[[bytes], None]
    ) -> None:
        self.heard = anyio.Event()
        self._talks = cycle(asked.talks[number:] + asked.talks[:number])
        self._answers = asked.answers
        self._stream = stream
        self._seen = seen
        self._arrived = arrived
        self._parser = httptools.HttpResponseParser(self)
        self._began_ns = 0
        self._name = b""
        self._body: list[bytes] = []
        self._words: list[str] = []
        self._transport: asyncio.Transport | None = None

    async def connect(self, url: str) -> None:
        address = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, address.hostname or "", address.port or 80)

    def hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._seen.faults += self._transport is not None
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.heard.set()
        self._body.append(data)
        if self._stream and data.endswith(b"\n\n"):
            events = b"".join(self._body).split(b"\n\n")
            self._body.clear()
            for event in events:
                if event and event != _DONE:
                    self._hear(orjson.loads(event.removeprefix(b"data: ")))

    def _hear(self, chunk: dict[str, Any]) -> None:
        [choice] = chunk["choices"]
        words = choice["delta"].get("content")
        if words:
            if not self._words:
                self._seen.first_ns.append(monotonic_ns() - self._began_ns)
            self._words.append(words)
        if words or choice["finish_reason"]:
            self._seen.chunks += 1
            self._arrived(self._name)

    def on_message_complete(self) -> None:
        self._seen.took_ns.append(monotonic_ns() - self._began_ns)
        if self._parser.get_status_code() != 200 or self._told() not in self._answers:
            self._seen.faults += 1
        if self._transport:
            self._ask(self._transport)

    def _told(self) -> str:
        if self._stream:
            return "".join(self._words)
        [choice] = orjson.loads(b"".join(self._body))["choices"]
        text: str = choice["message"]["content"]
        return text

    def _ask(self, transport: asyncio.Transport) -> None:
        self._name = b"%d" % next(_NUMBERS)
        self._body.clear()
        self._words.clear()
        body = next(self._talks).body(self._name, stream=self._stream)
        self._began_ns = monotonic_ns()
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
