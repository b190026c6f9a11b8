"""What an ``/abort_request`` says."""

from __future__ import annotations

from router_core.errors import BadRequest
from router_core.request import Request

__all__ = ["abort_prefix"]


def abort_prefix(request: Request) -> str | None:
    """What the rids begin with that ``request`` ends, ``""`` for all; None when it means nobody, or is no request.

    SGLang's ``AbortReq``: ``abort_all``, or the beginning of a ``rid``. Of a bad one the workers say what is wrong.
    """
    try:
        document = request.json()
    except BadRequest:
        return None
    if not isinstance(document, dict):
        return None
    if document.get("abort_all"):
        return ""
    rid = document.get("rid")
    return rid if isinstance(rid, str) and rid else None
