"""Audit log: a line for each control-plane call, with its caller, path and outcome."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from router_core.types import Message, Scope, Send
from slime_auth.access import AuthDecision, Level

__all__ = ["audited"]

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # whatever --log-level says: these lines have a flag of their own

_MAX_CHARS = 1024
_ROLES = {Level.ADMIN: "admin", Level.TRAFFIC: "user", Level.OPEN: None}


@contextmanager
def audited(decision: AuthDecision, scope: Scope, send: Send) -> Iterator[Send]:
    """Yield the ``send`` to answer with, and log a line when the block ends, also after an error.

    The line has no key, token, query or body. It is JSON in ASCII, so no caller can forge a line.
    """
    status: int | None = None

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        yield watched
    finally:
        caller, refusal = decision.caller, decision.refusal
        line = {
            "principal": None if caller.name is None else caller.name[:_MAX_CHARS],
            "auth_method": caller.how,
            "role": None if caller.name is None else _ROLES[caller.level],
            "method": scope["method"],
            "path": scope["raw_path"].decode("latin-1")[:_MAX_CHARS],
            "outcome": _outcome(status, denied=refusal is not None),
            "status": status,
        }
        if refusal is not None:
            line["details"] = str(refusal)
        logger.info("control_plane_audit %s", json.dumps(line))


def _outcome(status: int | None, *, denied: bool) -> str:
    if denied:
        return "denied"
    return "success" if status is not None and status < 400 else "failed"
