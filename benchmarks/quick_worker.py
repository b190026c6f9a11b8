"""A worker, in a process of its own, that discards request bodies as they come and answers at once.

The answers depend only on the path. So a large request costs the worker only the reading, and a large answer only
the writing.

    python -m benchmarks.quick_worker PORT GENERATED CHAT

``GENERATED`` and ``CHAT`` are files with the answers to ``/generate`` and ``/v1/chat/completions``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import httptools
import uvloop

from benchmarks.stand_in import FACTS

__all__: list[str] = []

_HEAD = b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class _Connection(asyncio.Protocol):
    """HTTP/1.1 of one connection; a path without an answer is 404."""

    def __init__(self, answers: Mapping[bytes, bytes]) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # the gateway also tries to speak gRPC with a worker
            self._transport.close()

    def on_message_begin(self) -> None:
        self._path = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_message_complete(self) -> None:
        answer = self._answers.get(self._path)
        status, body = (b"200 OK", answer) if answer is not None else (b"404 Not Found", b"{}")
        self._transport.writelines((_HEAD % (status, len(body)), body))  # a large body is not copied


async def _serve(port: int, generated: bytes, chat: bytes) -> None:
    answers = {path.encode(): fact for path, fact in FACTS.items()}
    answers |= {b"/generate": generated, b"/v1/chat/completions": chat}
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answers), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    number, *files = sys.argv[1:]
    uvloop.run(_serve(int(number), *(Path(file).read_bytes() for file in files)))
