"""A TCP relay between the router and an engine, which does to requests what networks and broken engines do."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, get_args

import anyio
import orjson
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

__all__ = ["TROUBLES", "Relay", "Trouble"]

Trouble = Literal[
    "slow",  # each piece of the answer waits
    "no HTTP",  # an answer that is not HTTP
    "bad JSON",  # 200, and a body that is not JSON
    "short body",  # fewer bytes than Content-Length says, then FIN
    "forged answer",  # the engine's own answer, and behind it another one that nobody asked for
    "FIN after request",  # the sending half is closed instead of an answer
    "FIN in answer",  # or within one
    "reset after request",
    "reset in answer",
    "silence",  # nothing ever comes
]
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)

_SLOW_S = 0.7
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_RID = re.compile(rb'"rid": ?(\[[^\]]*\]|"[^"]*")')
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_FORGED = (
    b'{"text":"FORGED","output_ids":[1],"meta_info":{"id":"f","finish_reason":{"type":"length","length":1},'
    b'"prompt_tokens":1,"completion_tokens":1,"weight_version":"1","output_token_logprobs":[[-0.5,1,null]]}}'
)
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Relay:
    """``trouble`` happens to each generation that is asked for while it is set, and with ``everything`` to the router's
    probes and control calls as well. ``hit`` has the rids that it happened to.
    """

    def __init__(self, port: int, engine_port: int) -> None:
        self.port = port
        self._engine_port = engine_port
        self.trouble: Trouble | None = None
        self.everything = False
        self.hit: dict[str, Trouble] = {}

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Relay until cancelled."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self.port)
        async with listener:
            task_status.started()
            await listener.serve(self._serve)

    async def _serve(self, router: SocketStream) -> None:
        async with router:
            try:
                engine = await anyio.connect_tcp("127.0.0.1", self._engine_port)
            except OSError:
                _let_close_reset(router)
                return
            async with engine, anyio.create_task_group() as both:
                link = _Link(self, router, engine)

                async def until_gone(work: Callable[[], Awaitable[None]]) -> None:
                    with suppress(*_GONE):
                        await work()
                    both.cancel_scope.cancel()

                both.start_soon(until_gone, link.pass_requests)
                both.start_soon(until_gone, link.pass_answers)

    def choose(self, request: bytes) -> Trouble | None:
        """Return the trouble for ``request``, if any, and note the rids that it hits."""
        if self.trouble is None or not (self.everything or request.startswith(b"POST /generate ")):
            return None
        for found in _RID.findall(request):
            rids = orjson.loads(found)
            for rid in [rids] if isinstance(rids, str) else rids:
                self.hit[rid] = self.trouble
        return self.trouble


class _Link:
    """One connection of the router, and the one to the engine that goes with it."""

    def __init__(self, relay: Relay, router: SocketStream, engine: SocketStream) -> None:
        self._relay = relay
        self._router = router
        self._engine = engine
        self._received = b""
        self._trouble: Trouble | None = None
        self._pieces = 0
        self._due = -1  # bytes that are missing of an answer whose length is known

    async def pass_requests(self) -> None:
        """One request at a time. Ends when the connection is to be closed."""
        while True:
            request = await self._request()
            self._trouble = self._relay.choose(request)
            self._pieces, self._due = 0, -1
            if self._trouble in (None, "slow", "forged answer", "FIN in answer", "reset in answer"):
                await self._engine.send(request)
            elif not await self._answer_instead():
                return

    async def _request(self) -> bytes:
        while b"\r\n\r\n" not in self._received:
            self._received += await self._router.receive()
        head = self._received.index(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._received, 0, head)
        size = head + (int(length[1]) if length is not None else 0)
        while len(self._received) < size:
            self._received += await self._router.receive()
        request, self._received = self._received[:size], self._received[size:]
        return request

    async def _answer_instead(self) -> bool:
        """False when the connection ends with that."""
        if self._trouble == "bad JSON":
            body = b'{"text":"Once upon'
            await self._router.send(_OK % len(body) + body)
            return True
        if self._trouble == "no HTTP":
            await self._router.send(b"\x15\x03\x01 what you want is not here\r\n\r\n")
        elif self._trouble == "short body":
            await self._router.send(_OK % 1000 + b'{"text":"Once upon')
            await self._finish()
        elif self._trouble == "FIN after request":
            await self._finish()
        elif self._trouble == "silence":
            await self._until_closed()
        else:
            _let_close_reset(self._router)
        return False

    async def _finish(self) -> None:
        """Half-closed: nothing more is sent, and the router finds out by itself."""
        await self._router.send_eof()
        await self._until_closed()

    async def _until_closed(self) -> None:
        while True:
            await self._router.receive()

    async def pass_answers(self) -> None:
        """As they come. Ends when the connection is to be closed."""
        while True:
            piece = await self._engine.receive()
            if self._trouble == "slow":
                await anyio.sleep(_SLOW_S)
            elif self._trouble == "forged answer":
                piece = self._with_another(piece)
            elif self._trouble in ("FIN in answer", "reset in answer"):
                self._pieces += 1
                if self._pieces > 4 or _LENGTH.search(piece):  # a stream is cut later
                    await self._router.send(piece[: len(piece) * 3 // 4])
                    if self._trouble == "reset in answer":
                        _let_close_reset(self._router)
                    else:
                        await self._router.send_eof()
                        await anyio.sleep_forever()  # the other direction ends it
                    return
            await self._router.send(piece)

    def _with_another(self, piece: bytes) -> bytes:
        if self._due < 0 and (length := _LENGTH.search(piece)):
            self._due = int(length[1]) + piece.index(b"\r\n\r\n") + 4
        if self._due > 0:
            self._due -= len(piece)
            if self._due == 0:
                return piece + _OK % len(_FORGED) + _FORGED
        return piece


def _let_close_reset(stream: SocketStream) -> None:
    raw: socket.socket = stream.extra(SocketAttribute.raw_socket)
    with suppress(OSError):  # the router has closed it meanwhile
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
