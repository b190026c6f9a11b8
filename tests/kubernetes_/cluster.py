"""The part of the Kubernetes API that tells of pods, on a real socket: lists in pages, watches, and their faults."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

__all__ = ["Cluster", "Watcher", "a_pod"]

Pod = dict[str, Any]


def a_pod(
    name: str,
    ip: str | None,
    *,
    labels: dict[str, str],
    namespace: str = "default",
    ready: bool = True,
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
) -> Pod:
    """A pod as the API tells of it, but for its uid and its version."""
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    status: dict[str, Any] = {"phase": phase, "conditions": conditions}
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": labels,
        "annotations": annotations or {},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {"containers": []},
        "status": status,
    }


@dataclass(eq=False)
class Watcher:
    """A watch that is open: what it asked for, and what it is yet to be sent; None ends it."""

    namespace: str | None
    selector: dict[str, str]
    parameters: dict[str, str]
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def wants(self, pod: Pod | None) -> bool:
        return pod is not None and _matches(pod, self.namespace, self.selector)


class Cluster:
    """An API server with pods. ``token`` is what it wants to be shown, if anything."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.version = 1000
        #: Whoever saw less than this has to list again.
        self.forgotten = 0
        #: A status that everything is answered with, and a page, if not what the API would say.
        self.status: int | None = None
        self.page = b""
        self.watchers: list[Watcher] = []
        #: Path and query of each request that was let in.
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.refused = 0
        self._uids = map("uid-{}".format, itertools.count(1))
        self._pods: dict[tuple[str, str], Pod] = {}
        self._past: list[tuple[int, Pod | None, Pod | None]] = []
        self._app = Starlette(
            routes=[
                Route("/api/v1/pods", self._answer),
                Route("/api/v1/namespaces/{namespace}/pods", self._answer),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # Changes of pods.

    def put(self, pod: Pod) -> Pod:
        """Create ``pod``, or change the one of its name; one that was told of before is not touched."""
        key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        before = self._pods.get(key)
        self.version += 1
        pod = copy.deepcopy(pod)
        pod["metadata"].setdefault("uid", before["metadata"]["uid"] if before else next(self._uids))
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._pods[key] = pod
        self._tell(before, pod)
        return pod

    def terminate(self, pod: Pod) -> Pod:
        """``pod`` was told to end, and has its grace period."""
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"deletionTimestamp": "2026-01-01T01:00:00Z", "deletionGracePeriodSeconds": 30}
        return self.put(pod)

    def delete(self, pod: Pod) -> None:
        """``pod`` is no more."""
        before = self._pods.pop((pod["metadata"]["namespace"], pod["metadata"]["name"]))
        self.version += 1
        self._tell(before, None)

    def _tell(self, before: Pod | None, after: Pod | None) -> None:
        self._past.append((self.version, before, after))
        for watcher in self.watchers:
            event = self._event(watcher, self.version, before, after)
            if event is not None:
                watcher.events.put_nowait(event)

    # Changes of watches.

    def bookmark(self) -> None:
        """Tell all watches how far they are."""
        metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
        event = _line("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata})
        for watcher in self.watchers:
            watcher.events.put_nowait(event)

    def forget(self) -> None:
        """Compact: whoever goes on from a version before this one is told that it is gone."""
        self.version += 1
        self.forgotten = self.version

    def say(self, line: bytes) -> None:
        """Send ``line`` to all watches as it is."""
        for watcher in self.watchers:
            watcher.events.put_nowait(line)

    def cut(self) -> None:
        """End all watches."""
        for watcher in self.watchers:
            watcher.events.put_nowait(None)

    # The API.

    async def _answer(self, request: Request) -> Response:
        query = dict(request.query_params)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            self.refused += 1
            return _failure(401, "Unauthorized", "Unauthorized")
        self.asked.append((request.url.path, query))
        if self.status is not None and self.page:
            return Response(self.page, self.status, media_type="text/html")
        if self.status is not None:
            return _failure(self.status, "Failed", "the server is currently unable to handle the request")
        selector = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        namespace = request.path_params.get("namespace")
        if query.get("watch") in ("1", "true"):
            return self._watch(Watcher(namespace, selector, query))
        return self._list(namespace, selector, query)

    def _list(self, namespace: str | None, selector: dict[str, str], query: dict[str, str]) -> Response:
        found = [pod for pod in self._pods.values() if _matches(pod, namespace, selector)]
        version, begin = self.version, 0
        if "continue" in query:
            version, begin = map(int, query["continue"].split("-"))
            if version < self.forgotten:
                return _failure(410, "Expired", "The provided continue parameter is too old")
        end = begin + int(query.get("limit", len(found) or 1))
        metadata = {"resourceVersion": str(version)}
        if end < len(found):
            metadata |= {"continue": f"{version}-{end}", "remainingItemCount": str(len(found) - end)}
        items = [{key: pod[key] for key in ("metadata", "spec", "status")} for pod in found[begin:end]]
        return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    def _watch(self, watcher: Watcher) -> Response:
        since = int(watcher.parameters.get("resourceVersion") or self.version)
        if since < self.forgotten:
            event = _line("ERROR", _status(410, "Expired", f"too old resource version: {since}"))
            return Response(event, media_type="application/json")
        for version, before, after in self._past:
            event_of = self._event(watcher, version, before, after) if version > since else None
            if event_of is not None:
                watcher.events.put_nowait(event_of)
        self.watchers.append(watcher)
        return StreamingResponse(self._stream(watcher), media_type="application/json")

    async def _stream(self, watcher: Watcher) -> AsyncIterator[bytes]:
        limit_s = float(watcher.parameters.get("timeoutSeconds", "3600"))
        try:
            async with asyncio.timeout(limit_s):
                while (event := await watcher.events.get()) is not None:
                    yield event
        except TimeoutError:
            pass  # as a server ends it
        finally:
            self.watchers.remove(watcher)

    def _event(self, watcher: Watcher, version: int, before: Pod | None, after: Pod | None) -> bytes | None:
        """Return the event of a change for ``watcher``: a pod whose labels fit no more is deleted for it."""
        if after is not None and watcher.wants(after):
            return _line("MODIFIED" if watcher.wants(before) else "ADDED", after)
        if before is not None and watcher.wants(before):
            gone = copy.deepcopy(after or before)
            gone["metadata"]["resourceVersion"] = str(version)
            return _line("DELETED", gone)
        return None

    def lists(self) -> Iterator[dict[str, str]]:
        """The queries of the lists."""
        return (query for _, query in self.asked if "watch" not in query)


def _matches(pod: Pod, namespace: str | None, selector: dict[str, str]) -> bool:
    labels = pod["metadata"]["labels"]
    return namespace in (None, pod["metadata"]["namespace"]) and selector.items() <= labels.items()


def _line(kind: str, content: Any) -> bytes:
    return orjson.dumps({"type": kind, "object": content}) + b"\n"


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return status | {"message": message, "reason": reason, "code": code}


def _failure(code: int, reason: str, message: str) -> Response:
    return JSONResponse(_status(code, reason, message), code)
