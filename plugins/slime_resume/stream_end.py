"""The end of a stream whose generation has ended."""

from __future__ import annotations

import anyio

from router_core.errors import HTTPError
from router_core.reply import Reply

__all__ = ["rest_of"]

#: Seconds and bytes that an engine has to say that a stream is over.
_END_S, _END_BYTES = 1.0, 1 << 16


async def rest_of(reply: Reply) -> bytes:
    """Return the bytes behind the last event of a generation, ``[DONE]``, and close ``reply``.

    One that is given up before its end is aborted at the engine, by a name that the next attempt has, too.
    """
    rest = bytearray()
    with anyio.move_on_after(_END_S):
        try:
            last = False
            while not last and len(rest) < _END_BYTES:
                piece, last = await reply.next_piece()
                rest += piece
        except HTTPError:
            pass  # all that matters has come
    reply.close()
    return bytes(rest)
