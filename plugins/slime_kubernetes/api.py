"""Requests to the Kubernetes API that list pods and watch them. A watch continues where a list or a watch ended.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import random
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson

from slime_kubernetes.settings import Settings

__all__ = ["Api", "Refused"]

_CONNECT_S = 10.0
_LIST_S = 30.0
#: A watch that brings nothing for this long counts as dead. Bookmarks come about once a minute.
_SILENCE_S = 90.0
#: A watch's lifetime is drawn from this range, so that the cluster's watches do not all end at once.
_WATCH_S = (240, 480)
#: Pods in one page of a list. A pod has some kilobytes, and the event loop stands still while a page is parsed.
_PAGE = 100
_MAX_PAGE_BYTES = 1 << 26
#: The most pages of a list. No cluster has so many pods.
_MAX_PAGES = 2000
#: etcd takes no object of more than 1.5 MiB.
_MAX_EVENT_BYTES = 1 << 23
_MAX_ERROR_BYTES = 1 << 16
_TOKEN = re.compile(rb"[ -~]+")


class Refused(Exception):
    """The API reported an error, as its answer to a request or as an event of a watch."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"it answered {status}: {message}")
        self.status = status


class _Token(httpx.Auth):
    """The bearer token in ``file``, read for each request: Kubernetes replaces it before it expires."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._file.read_bytes().strip()
        if not _TOKEN.fullmatch(token):  # httpx's error for an invalid header would contain the token
            raise OSError(f"no token in {self._file}")
        request.headers["Authorization"] = f"Bearer {token.decode('ascii')}"
        yield request


class Api:
    """Requests for the pods with ``labels``.

    Methods raise httpx.HTTPError, OSError and Refused. For an invalid answer they raise ValueError, LookupError,
    TypeError or AttributeError.
    """

    def __init__(self, settings: Settings, labels: Mapping[str, str]) -> None:
        where = "" if settings.namespace is None else f"/namespaces/{settings.namespace}"
        self._url = f"{settings.server}/api/v1{where}/pods"
        self._account = settings.account
        self._labels = ",".join(f"{key}={value}" for key, value in labels.items())

    @asynccontextmanager
    async def session(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open a client. The CA is read each time, since Kubernetes may have replaced it."""
        async with httpx.AsyncClient(
            auth=_Token(self._account / "token"),
            verify=ssl.create_default_context(cafile=self._account / "ca.crt"),
            trust_env=False,
            params={"labelSelector": self._labels},
        ) as client:
            yield client

    async def list(self, client: httpx.AsyncClient) -> tuple[list[dict[str, Any]], str]:
        """Return all pods, and the resource version of the list."""
        pods: list[dict[str, Any]] = []
        further = ""
        for _ in range(_MAX_PAGES):
            with anyio.fail_after(_LIST_S):
                page = await self._page(client, further)
            pods += page["items"] or ()
            further = page["metadata"].get("continue")
            if not further:
                return pods, page["metadata"]["resourceVersion"]
        raise ValueError(f"a list of more than {_MAX_PAGES} pages")

    async def _page(self, client: httpx.AsyncClient, further: str) -> Any:
        query = {"limit": str(_PAGE)} | ({"continue": further} if further else {})
        timeout = httpx.Timeout(_LIST_S, connect=_CONNECT_S)
        async with client.stream("GET", self._url, params=query, timeout=timeout) as answer:
            if answer.status_code != 200:
                raise _refusal(answer.status_code, await _beginning(answer, _MAX_ERROR_BYTES))
            body = await _beginning(answer, _MAX_PAGE_BYTES)
        if len(body) > _MAX_PAGE_BYTES:
            raise ValueError(f"a page of more than {_MAX_PAGE_BYTES} bytes")
        return orjson.loads(body)

    async def watch(
        self, client: httpx.AsyncClient, version: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield ``("OPEN", {})`` when the watch has begun, then type and object of each event after ``version``.

        Ends when the server ends the watch.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*_WATCH_S)),
        }
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        async with client.stream("GET", self._url, params=query, timeout=timeout) as answer:
            if answer.status_code != 200:
                raise _refusal(answer.status_code, await _beginning(answer, _MAX_ERROR_BYTES))
            yield "OPEN", {}
            rest = b""
            # Not aiter_lines(), which also ends lines at U+0085 and U+2028: annotations may contain these.
            async for chunk in answer.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_EVENT_BYTES:
                    raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
                for line in filter(None, lines):
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        raise _refused(event["object"])
                    yield event["type"], event["object"]


async def _beginning(answer: httpx.Response, size: int) -> bytes:
    """Return the body, cut off after the chunk with which it exceeds ``size``."""
    body = bytearray()
    async for chunk in answer.aiter_bytes():
        body += chunk
        if len(body) > size:
            break
    return bytes(body)


def _refusal(status: int, body: bytes) -> Refused:
    try:
        said = orjson.loads(body)
    except ValueError:
        return Refused(status, body[:200].decode(errors="replace"))
    return _refused({"code": status} | said if isinstance(said, dict) else {"code": status})


def _refused(status: Mapping[str, Any]) -> Refused:
    """Return the error for a v1 Status, the API's object that describes a failure."""
    return Refused(int(status.get("code") or 0), str(status.get("message"))[:500])
