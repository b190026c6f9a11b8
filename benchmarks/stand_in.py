"""A cheap worker in this process that answers ``/generate`` or chats from a table, and counts what it gets.

It has only the HTTP that proxies need, on bare transports, so that it takes little processor time.
``max_new_tokens`` selects the answer. The requests are counted, as are those with ids, so that a run can check what
the proxy sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, cycle
from typing import cast

import httptools

__all__ = ["FACTS", "STREAM_ID", "Chunk", "Fixed", "StandIn", "Stream", "Template", "serving_stand_in"]

#: A worker's answers to probes, by path.
FACTS: dict[str, bytes] = {
    "/health": b"{}",
    **dict.fromkeys(
        ("/model_info", "/get_model_info"),
        b'{"model_path":"stand-in","tokenizer_path":"stand-in","is_generation":true,"weight_version":"default"}',
    ),
    **dict.fromkeys(
        ("/server_info", "/get_server_info"),
        b'{"model_path":"stand-in","served_model_name":"stand-in","dp_size":1,"tp_size":1,"version":"0.5.9"}',
    ),
}

_ID = "@id@"
STREAM_ID = b"stream-0000-00000000"
_PROMPT_TOKENS = -424242
_MAX_NEW_TOKENS = re.compile(rb'"max_new_tokens":\s*(\d+)')
_RID = re.compile(rb'"rid":\s*"([^"]+)"')
_STREAM = re.compile(rb'"stream":\s*true')
_STAMP_DIGITS = 20


class Template:
    """One JSON answer with two gaps: its id and the number of prompt tokens."""

    def __init__(self, payload: Callable[[str, int], Mapping[str, object]]) -> None:
        text = json.dumps(payload(_ID, _PROMPT_TOKENS), separators=(",", ":")).encode()
        self._before, rest = text.split(_ID.encode())
        self._between, self._after = rest.split(str(_PROMPT_TOKENS).encode())

    def render(self, rid: bytes, prompt_tokens: int) -> bytes:
        return b"%b%b%b%d%b" % (self._before, rid, self._between, prompt_tokens, self._after)


class Fixed:
    """A constant answer, for bodies that are too large to be made anew for each request."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def render(self, rid: bytes, prompt_tokens: int) -> bytes:
        return self._body


class Chunk:
    """One server-sent event. It contains the time at which it was written, in a fixed number of digits.

    The time is the last member of ``meta_info``; in an event without ``meta_info``, the last member of the event.
    SGLang's ``meta_info``, too, has figures that differ in each event of a stream. If the event has the id
    ``STREAM_ID``, the id of the request replaces it. All ids of requests that get such an event have the length of
    ``STREAM_ID``.
    """

    def __init__(self, payload: Mapping[str, object]) -> None:
        text = json.dumps(payload, separators=(",", ":")).encode()
        braces = b"}}" if "meta_info" in payload else b"}"
        event = b"data: " + text.removesuffix(braces) + b',"stamp":"'
        self._end = b'"' + braces + b"\n\n"
        self.size_bytes = len(event) + _STAMP_DIGITS + len(self._end)
        self._before, self._id, self._behind = (b"%x\r\n%b" % (self.size_bytes, event)).partition(STREAM_ID)

    def render(self, rid: bytes) -> bytes:
        """Return the event in its HTTP chunk, with the present time. ``rid``: the id of the request."""
        name = rid if self._id else b""
        return b"%b%b%b%020d%b\r\n" % (self._before, name, self._behind, time.monotonic_ns(), self._end)

    @staticmethod
    def stamp_ns(event: bytes) -> int:
        """Return the nanosecond at which ``event`` (without the blank line at its end) was written."""
        return int(event.rstrip(b'}"')[-_STAMP_DIGITS:])


@dataclass(slots=True)
class Stream:
    """A streamed answer. Each call of ``advance`` writes one chunk."""

    transport: asyncio.Transport
    chunks: Iterator[Chunk]
    streams: dict[bytes, Stream]
    rid: bytes

    def advance(self) -> None:
        """Write the next chunk. After the last chunk, write the end of the answer, once."""
        chunk = next(self.chunks, None)
        if chunk is not None:
            self.transport.write(chunk.render(self.rid))
        elif self.streams.pop(self.rid, None) is not None:
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


class StandIn:
    """The answers, and counts of the requests. It runs in one event loop and never awaits.

    ``answers``: the answers that do not stream, by ``max_new_tokens``. A request without ``max_new_tokens`` gets
    one of ``answers[0]``. The answers of one number are given in turn. ``sampled_before``: ids of earlier answers;
    ``with_sampled_ids`` counts the requests that contain these ids. ``name_of`` finds the name of a stream in its
    request.
    """

    def __init__(
        self,
        answers: Mapping[int, Sequence[Template | Fixed]],
        *,
        chunks: Sequence[Chunk] = (),
        sampled_before: Sequence[int] = (),
        name_of: re.Pattern[bytes] = _RID,
    ) -> None:
        self._name_of = name_of
        self._answers = {length: cycle(templates) for length, templates in answers.items()}
        self._chunks = chunks
        self._marker = b",".join(b"%d" % token for token in sampled_before)
        self._numbers = count()
        self.streams: dict[bytes, Stream] = {}
        self.requests = 0
        self.with_ids = 0
        self.with_sampled_ids = 0

    def reset_counts(self) -> None:
        self.requests = self.with_ids = self.with_sampled_ids = 0

    def answer(self, body: bytes, transport: asyncio.Transport) -> None:
        """Answer one ``POST``."""
        self.requests += 1
        prompt_tokens = self._prompt_tokens(body)
        if _STREAM.search(body):
            return self._open_stream(body, transport)
        match = _MAX_NEW_TOKENS.search(body)
        template = next(self._answers[int(match[1]) if match else 0])
        named = _RID.search(body)
        reply = template.render(named[1] if named else b"%032x" % next(self._numbers), prompt_tokens)
        transport.writelines((_head(b"application/json", b"content-length: %d" % len(reply)), reply))
        return None

    def _open_stream(self, body: bytes, transport: asyncio.Transport) -> None:
        match = self._name_of.search(body)
        rid = match[1] if match else b"%d" % next(self._numbers)
        transport.write(_head(b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked"))
        self.streams[rid] = stream = Stream(transport, iter(self._chunks), self.streams, rid)
        stream.advance()

    def _prompt_tokens(self, body: bytes) -> int:
        """Return the number of ids in a request, by their commas. Count the request if it has ids.

        Returns 1 for a text, which is not tokenised here.
        """
        start = body.find(b'"input_ids":')
        if start < 0:
            return 1
        ids = body[start : body.find(b"]", start)].replace(b" ", b"")
        self.with_ids += 1
        self.with_sampled_ids += bool(self._marker) and self._marker in ids
        return ids.count(b",") + 1


class _Connection(asyncio.Protocol):
    """HTTP/1.1 of one connection; requests one after another."""

    def __init__(self, stand_ins: Mapping[bytes, StandIn]) -> None:
        self._stand_ins = stand_ins
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it

    def connection_lost(self, exc: Exception | None) -> None:
        for stand_in in self._stand_ins.values():
            streams = stand_in.streams
            for stream in [one for one in streams.values() if one.transport is self._transport]:
                del streams[stream.rid]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # the gateway also tries to speak gRPC with a worker
            self._transport.close()

    def on_message_begin(self) -> None:
        self._path = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if stand_in := self._stand_ins.get(self._path):
            return stand_in.answer(b"".join(self._body), self._transport)
        fact = FACTS.get(self._path.decode())
        status, reply = (b"200 OK", fact) if fact is not None else (b"404 Not Found", b"{}")
        framing = b"content-length: %d" % len(reply)
        self._transport.write(_head(b"application/json", framing, status) + reply)
        return None


@asynccontextmanager
async def serving_stand_in(stand_in: StandIn, chat: StandIn | None = None) -> AsyncIterator[str]:
    """Serve ``stand_in`` on a free loopback port in the running loop; yields its URL.

    ``chat`` answers ``/v1/chat/completions``.
    """
    stand_ins = {b"/generate": stand_in}
    if chat is not None:
        stand_ins[b"/v1/chat/completions"] = chat
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(stand_ins), "127.0.0.1", 0, backlog=4096)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _head(content_type: bytes, framing: bytes, status: bytes = b"200 OK") -> bytes:
    """Return the head of a response, as a worker on uvicorn sends it."""
    return (
        b"HTTP/1.1 %b\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\nserver: uvicorn\r\n"
        b"%b\r\ncontent-type: %b\r\n\r\n" % (status, framing, content_type)
    )
