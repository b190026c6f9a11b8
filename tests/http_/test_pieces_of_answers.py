"""Pieces of a worker's answer between its connection and its reader."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slime_http.connection import Connection
from slime_http.limits import Limits
from slime_http.upstream import Upstream
from slime_http.upstream_reply import UpstreamReply

pytestmark = pytest.mark.anyio

LARGE = b"x" * (64 * 1024)


class _Wire(asyncio.Transport):
    """A transport that notes when reading is paused."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        pass


@contextmanager
def answering() -> Iterator[tuple[Connection, UpstreamReply, _Wire]]:
    """A connection whose worker has begun a long answer."""
    upstream = Upstream("http://127.0.0.1:1", Limits())
    with socket.socket() as end:
        wire, connection = _Wire(end), Connection(upstream)
        connection.connection_made(wire)
        reply = connection.begin("GET", b"head", b"")
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n")
        yield connection, reply, wire
    upstream.close()


async def test_large_pieces_are_read_one_by_one_and_small_ones_joined() -> None:
    with answering() as (connection, reply, wire):
        for piece in (*[LARGE] * 5, b"a", b"b"):
            connection.data_received(piece)
        assert wire.is_paused
        for _ in range(5):
            assert await reply.read() == LARGE
            assert wire.is_paused  # until everything was taken
        assert await reply.read() == b"ab"
        assert not wire.is_paused


async def test_a_piece_that_was_read_does_not_count_as_waiting() -> None:
    with answering() as (connection, reply, wire):
        for _ in range(20):
            connection.data_received(LARGE)
            assert not wire.is_paused
            assert await reply.read() == LARGE
        for _ in range(4):
            connection.data_received(LARGE)
        assert await reply.read() == LARGE
        connection.data_received(LARGE)
        assert not wire.is_paused
        connection.data_received(b"1")
        assert wire.is_paused
