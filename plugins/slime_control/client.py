"""A client for trainers: it controls all engines through the router.

::

    async with RouterClient("http://127.0.0.1:30000").paused() as router:
        await router.update_weights_from_disk("/checkpoints/7", weight_version="7")
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import anyio
import httpx

__all__ = ["ControlFailed", "RouterClient"]


class ControlFailed(Exception):
    """A call that failed at all workers, or that the router refused. ``answer``: the answer's JSON object, or empty."""

    def __init__(self, status: int, message: str, answer: dict[str, Any]) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.answer = answer


class RouterClient:
    """An asynchronous client of the router. Methods return the router's answer.

    The answer's ``"success"`` is false when some workers failed, but not all. Methods raise ControlFailed and
    httpx.TransportError.

    ``timeout_s`` should exceed the router's ``--control-timeout-s``. ``api_key``: the router's ``--admin-api-key``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 660.0,
        api_key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if api_key is not None:
            headers = {"authorization": f"Bearer {api_key}", **(headers or {})}
        self._entered = False
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout_s, headers=headers)

    async def call(self, path: str, **fields: Any) -> dict[str, Any]:
        """Make the control call ``path``, with ``fields`` as its JSON body."""
        reply = await self._http.post(path, json=fields)
        try:
            answer = reply.json()
        except ValueError:
            answer = {}
        if not isinstance(answer, dict):
            answer = {}
        if not reply.is_success:
            error = answer.get("error")
            message = error.get("message") if isinstance(error, dict) else answer.get("message")
            raise ControlFailed(reply.status_code, str(message or reply.text[:200]), answer)
        return answer

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> dict[str, Any]:
        """Stop generation everywhere; new requests wait in the router."""
        return await self.call("/pause_generation", mode=mode)

    async def resume(self) -> dict[str, Any]:
        """Let generation continue."""
        return await self.call("/continue_generation")

    @asynccontextmanager
    async def paused(
        self, mode: Literal["abort", "retract", "in_place"] = "abort"
    ) -> AsyncIterator[RouterClient]:
        """Pause generation within the block. Generation continues when the block ends, also if an error ends it.

        The end of the block also closes the client, unless an ``async with client`` block is open around it.
        """
        try:
            await self.pause(mode)
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await self.resume()
                finally:
                    if not self._entered:
                        await self.aclose()

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Load weights from a directory that all workers can read.

        Without ``weight_version``, the router asks the workers for the version.
        """
        if weight_version is not None:
            fields["weight_version"] = weight_version
        return await self.call("/update_weights_from_disk", model_path=model_path, **fields)

    async def abort(self, rid: str | None = None) -> dict[str, Any]:
        """Abort the requests whose rid begins with ``rid``, or all requests if ``rid`` is None."""
        return await self.call("/abort_request", **({"abort_all": True} if rid is None else {"rid": rid}))

    async def flush_cache(self) -> dict[str, Any]:
        """Empty the engines' prefix caches. A busy engine refuses."""
        return await self.call("/flush_cache")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> RouterClient:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
