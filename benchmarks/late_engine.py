"""The embedded engine with SGLang's delay: it notices a client's disconnect only after 4 s."""

from __future__ import annotations

import sys

import anyio

from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_engine.app import make_app
from slime_engine.settings import Settings
from slime_http.serving import bind, run

#: SGLang's ``TokenizerManager._wait_one_response`` looks at the connection when no output has come for this time.
_NOTICED_S = 4.0


def late(app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` so that it gets ``http.disconnect`` four seconds late."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await anyio.sleep(_NOTICED_S)
            return message

        await app(scope, hear if scope["type"] == "http" else receive, send)

    return wrapped


if __name__ == "__main__":
    run(late(make_app(Settings(tokens_per_second=100.0))), bind("127.0.0.1", int(sys.argv[1])), grace_s=1)
