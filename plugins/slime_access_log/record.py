"""Facts about one request, and their names in the log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from typing import Any

from router_core import Worker
from router_core.request_ids import request_id_of
from router_core.types import Scope
from slime_http.asgi import FAILED
from slime_http.error_codes import code_in
from slime_logging.waits import Wait

__all__ = ["Record"]

_MAX_CHARS = 1024
#: Largest number of failed attempts, and of holds, that a line lists.
_MAX_LISTED = 10
#: A line has ``client_s``, the seconds for which the client held up the answer, only if it is at least this.
_CLIENT_S = 0.01
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")
_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Record:
    """One request. Times come from ``perf_counter``; 0.0: not known yet.

    ``complete``: the last part of the answer was given to the server. ``usage``: numbers of tokens by field.
    ``reasons``: for each recorded sequence, why its tokens are not exact, or None if they are.
    """

    __slots__ = (
        "attempts", "began", "caller", "client_gone", "client_s", "complete", "error", "failed", "first_byte_at",
        "held", "reasons", "scope", "sent_at", "sent_bytes", "session", "status", "untouched", "usage", "waits",
        "workers",
    )  # fmt: skip

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.began = perf_counter()
        self.sent_at = self.first_byte_at = self.client_s = 0.0
        self.status = self.sent_bytes = self.attempts = 0
        self.complete = self.client_gone = self.untouched = False
        self.error = b""
        self.caller: str | None = None
        self.session: str | None = None
        self.workers: dict[str, None] = {}
        self.failed: list[str] = []
        self.held: list[str] = []
        self.waits: dict[Wait, float] = {}
        self.usage: dict[str, int] = {}
        self.reasons: list[str | None] = []

    def sent(self, worker: Worker) -> None:
        """Note that the request goes to ``worker`` now."""
        self.attempts += 1
        self.sent_at = self.sent_at or perf_counter()
        self.workers.pop(worker.name, None)
        self.workers[worker.name] = None  # in last place

    def attempt_failed(self, worker: Worker, code: str) -> None:
        """Note that ``worker`` failed an attempt."""
        if len(self.failed) < _MAX_LISTED:
            self.failed.append(f"{worker.name} {code}")

    def no_worker(self, workers: Iterable[Worker]) -> None:
        """Note the holds of ``workers``: none of them could be chosen."""
        held = (f"{worker.name} {owner}" for worker in workers for owner in worker.holds)
        self.held = [*islice(held, _MAX_LISTED)] or self.held

    @contextmanager
    def waiting(self, why: Wait) -> Iterator[None]:
        """See :class:`slime_access_log.contracts.RequestLog`."""
        began = perf_counter()
        try:
            yield
        finally:
            self.waits[why] = self.waits.get(why, 0.0) + perf_counter() - began

    def add_tokens(self, tokens: Mapping[str, int | None]) -> None:
        """Add the numbers of ``tokens`` of one part of the request. None: the number is unknown."""
        for name, number in tokens.items():
            if number is not None:
                self.usage[name] = self.usage.get(name, 0) + number

    def fields(self) -> dict[str, Any]:
        """Return what is known, at the end of the request; docs/plugins/access_log.md has the names."""
        scope, began = self.scope, self.began
        duration_s = perf_counter() - began
        found: dict[str, Any] = {}
        if (request_id := request_id_of(scope)) is not None:
            found["id"] = request_id
        if (trace_id := _trace_id(scope)) is not None:
            found["trace_id"] = trace_id
        if (client := _address(scope)) is not None:
            found["client"] = client
        if self.caller is not None:
            found["caller"] = self.caller[:_MAX_CHARS]
        found["method"] = scope["method"][:_MAX_CHARS]
        found["path"] = scope["raw_path"][:_MAX_CHARS].decode("latin-1")  # no query: it may have secrets
        if self.status:
            found["status"] = self.status
        found["outcome"] = self._outcome
        if (code := self._code) is not None:
            found["error"] = code
        if self.session is not None:
            found["session"] = self.session[:_MAX_CHARS]
        if self.workers:
            found["worker"] = next(reversed(self.workers))
        if self.attempts > 1 or self.failed or self.held:
            found |= self._attempt_fields()
        found["duration_s"] = round(duration_s, 4)
        if self.sent_at:
            found["to_worker_s"] = round(self.sent_at - began, 4)
        if self.first_byte_at:
            found["first_byte_s"] = round(self.first_byte_at - began, 4)
        for why, seconds in self.waits.items():
            found[f"{why}_s"] = round(seconds, 4)
        if self.client_s >= _CLIENT_S:
            found["client_s"] = round(self.client_s, 4)
        found["bytes"] = self.sent_bytes
        found |= self.usage
        if self.reasons:
            found["exact"] = not any(self.reasons)
            if reason := next(filter(None, self.reasons), None):
                found["inexact_reason"] = reason[:_MAX_CHARS]
        elif self.untouched:
            found["exact"] = False
        return found

    def _attempt_fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if len(self.workers) > 1:
            found["workers"] = [*self.workers]
        if self.attempts > 1:
            found["attempts"] = self.attempts
        if self.failed:
            found["failed"] = self.failed
        if self.held:
            found["held"] = self.held
        return found

    @property
    def _outcome(self) -> str:
        if self.client_gone:
            return "client_gone"
        return "complete" if self.complete and self._failure is None else "broke_off"

    @property
    def _failure(self) -> str | None:
        """The code of the error that ended the answer after its head was sent."""
        return self.scope.get("state", {}).get(FAILED) if not self.client_gone else None

    @property
    def _code(self) -> str | None:
        """The code of the answer's error, or None."""
        code = code_in(self.error) if self.error else self._failure
        return code if code is not None and _CODE.fullmatch(code) else None


def _address(scope: Scope) -> str | None:
    host, port = scope.get("client") or (None, 0)
    return f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}" if host else None


def _trace_id(scope: Scope) -> str | None:
    """Return the trace of the request's ``traceparent`` (W3C Trace Context), if it has one."""
    for name, value in scope["headers"]:
        if name == b"traceparent" and (found := _TRACE_PARENT.match(value)) is not None:
            return found[1].decode()
    return None
