"""Checks of ``rid``, the name of a generation, in the bodies of generations and of ``/abort_request``."""

from __future__ import annotations

from router_core.errors import BadRequest
from router_core.exchange import check_length
from router_core.request import Request

__all__ = ["abort_prefix", "check_rid"]

#: A name of at most this many characters never exceeds the limit in bytes of ``check_length``.
_SURELY_SHORT = 256
#: The largest number of names in one request.
_MOST_NAMES = 1 << 16


def check_rid(rid: object) -> None:
    """Check the size of ``rid``, which is a name, or a list with a name for each prompt, before the router stores it.

    A long name would take much memory, since engines and plugins repeat a single name for each prompt of a batch.
    Raises BadRequest for a name that is too long, and for too many names.
    """
    if isinstance(rid, str) and len(rid) <= _SURELY_SHORT:
        return
    names = rid if isinstance(rid, list) else [rid]
    if len(names) > _MOST_NAMES:
        raise BadRequest(f'"rid" has at most {_MOST_NAMES} names, got {len(names)}')
    if set(map(type, names)) == {str} and max(map(len, names)) <= _SURELY_SHORT:
        return  # many names are checked in one pass
    for name in names:
        if isinstance(name, str):
            check_length('"rid"', name)


def abort_prefix(request: Request) -> str | None:
    """Return the prefix of the rids that ``request`` aborts: ``""`` for all; None for a request without a valid prefix.

    The body is SGLang's ``AbortReq``: ``abort_all``, or as ``rid`` the beginning of rids. Workers answer an invalid
    request with an error of their own. Raises BadRequest for a ``rid`` that is too long.
    """
    document = request.json_object_or_none()
    if document is None:
        return None
    if document.get("abort_all"):
        return ""
    rid = document.get("rid")
    if not isinstance(rid, str) or not rid:
        return None
    check_rid(rid)
    return rid
