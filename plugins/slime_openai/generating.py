"""``/generate`` requests of this plugin. They pass through all plugins, like a client's own requests."""

from __future__ import annotations

from typing import Any

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.router import Router
from slime_openai.responses.outputs import EngineRefused
from slime_sglang.generation import TOKENISED

__all__ = ["EVENT_STREAM", "JSON", "generate"]

JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


async def generate(
    router: Router,
    parent: Exchange,
    payload: dict[str, Any],
    session: str | None,
    *,
    is_tokenised: bool = False,
) -> tuple[Exchange, Reply]:
    """Send a ``/generate`` request for the client's exchange ``parent``.

    Return the new exchange, which the caller closes, and the reply. ``is_tokenised``: the router made the ``input_ids``
    in ``payload``. If it is False, the client gave them, or ``payload`` has none.

    Raises HTTPError. The client's ``Authorization`` is passed on, since workers may need a key.
    """
    inner = router.generation(payload, session=session, parent=parent)
    if is_tokenised:
        inner.notes[TOKENISED] = True
    key = parent.request.header(b"authorization")
    if key is not None:
        inner.request.headers.append((b"authorization", key))
    try:
        reply = await router.respond(inner)
        if reply.status != 200:
            raise EngineRefused(reply.status, await reply.read())
    except BaseException:
        inner.close()
        raise
    return inner, reply
