"""One look at a worker: its health, and its weight version."""

from __future__ import annotations

import anyio
import orjson

from router_core import HTTPError, Worker
from router_core.errors import WorkerBroke, WorkerTimeout, WorkerUnreachable
from router_core.router import Router
from router_core.weights import version_named
from slime_health.judge import Unwell
from slime_http.limits import Limits
from slime_http.upstream import Upstream

__all__ = ["Probe"]

_MAX_INFO_BYTES = 1 << 20


class Probe:
    """One look, on connections of its own.

    If the worker keeps the first connection open, all requests use it, and so reach one process. All connections are
    closed at the end. ``timeout_s``: the deadline of each answer.
    """

    def __init__(self, router: Router, worker: Worker, timeout_s: float) -> None:
        # The cancel scope in _get is the exact deadline; these limits are checked only once a second.
        limits = Limits(connect_s=2 * timeout_s, first_byte_s=2 * timeout_s, silence_s=2 * timeout_s)
        reachable, key = router.addresses.reachable, worker.api_key
        self._upstream = Upstream(worker.url, limits, router.worker_tls, api_key=key, reachable=reachable)
        self._worker = worker
        self._timeout_s = timeout_s

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._upstream.close()

    async def is_well(self, endpoint: str) -> None:
        """Return when ``endpoint`` was answered with a 2xx; the body is not read. Raises HTTPError."""
        status, _ = await self._get(endpoint, 0)
        if not 200 <= status < 300:
            raise Unwell(f"it answered {endpoint} with {status}")

    async def weight_version(self) -> str | None:
        """Return the version of the worker's weights; None when it names no version. Raises HTTPError.

        If the worker has named a version before, an answer that is not JSON counts as broken.
        """
        if self._worker.passthrough:
            return None
        for path in ("/model_info", "/get_model_info"):  # the second: older engines
            status, body = await self._get(path, _MAX_INFO_BYTES)
            if status >= 500:
                raise Unwell(f"it answered {path} with {status}")
            if status != 404:
                break
        try:
            about = orjson.loads(body) if status == 200 else None
        except orjson.JSONDecodeError:
            if self._worker.said_version is not None:
                raise WorkerBroke(f"its answer to {path} is not JSON") from None
            return None  # no SGLang server, but it can be proxied to
        return version_named(about.get("weight_version")) if isinstance(about, dict) else None

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        """Return the status and the beginning of the body. Raises HTTPError."""
        try:
            with anyio.fail_after(self._timeout_s):
                answer = await self._upstream.request("GET", path.encode("ascii"), [])
                try:
                    body = bytearray()
                    while len(body) < max_bytes and (piece := await answer.read()):
                        body += piece
                finally:
                    answer.close()
        except TimeoutError:
            raise WorkerTimeout(f"no answer to {path} within {self._timeout_s:g} s") from None
        except HTTPError:
            raise
        except Exception as error:  # no trouble with a worker may end the router
            raise WorkerUnreachable(f"it cannot be asked: {type(error).__name__}: {error}") from error
        return answer.status, bytes(body)
