"""An httpx transport that sends requests only to addresses at which a worker may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

__all__ = ["CheckedTransport"]


class CheckedTransport(httpx.AsyncHTTPTransport):
    """An httpx transport that sends nothing to an address at which no worker may be.

    It drops ``Set-Cookie``, since httpx would send one worker's cookie to all workers of the same host.
    ``reachable(url, address)`` returns True when a worker may be at that IP address. ``options`` go to
    ``httpx.AsyncHTTPTransport``.
    """

    def __init__(self, reachable: Callable[[str, str], bool], **options: Any) -> None:
        super().__init__(trust_env=False, **options)
        self._reachable = reachable

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``. Raises httpx.ConnectError when the server's address is not ``reachable``."""
        url = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"

        async def connected(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                stream = info["return_value"]
                try:
                    peer = stream.get_extra_info("server_addr")[0]
                except (AttributeError, TypeError):  # uvloop: the connection was reset as it opened
                    raise httpx.ConnectError(f"{url} closed the connection at once") from None
                if not self._reachable(url, peer):
                    await stream.aclose()
                    cure = f"add {request.url.host} to --allow-worker"
                    raise httpx.ConnectError(f"{url} is at {peer}, a reserved address: {cure}")

        request.extensions = {**request.extensions, "trace": connected}
        answer = await super().handle_async_request(request)
        answer.headers.pop("set-cookie", None)
        return answer
