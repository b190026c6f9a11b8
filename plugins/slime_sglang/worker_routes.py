"""Routes for workers: registration, removal, changes and status.

``/add_worker``, ``/remove_worker`` and ``/list_workers`` are slime's API, ``/workers`` is the SGLang gateway's.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router_core import Worker
from router_core.errors import BadRequest, HTTPError, WorkerNotFound
from router_core.registration import Refusal
from router_core.router import Router
from router_core.routes import JSON, ControlRoute, by_method, json_object, shown
from router_core.workers import worker_url
from slime_sglang.facts import BOOTSTRAP_PORT, MODEL_ID, WORKER_TYPES, described

__all__ = ["WorkerRefused", "worker_routes"]

#: The largest number of labels of a worker, and of characters in a label's name or value, or in a model's name.
_MAX_LABELS, _MAX_LABEL = 64, 1024

#: Fields of a registration, or of a change of a registration.
_KNOWN = frozenset(
    (
        "api_key",
        "bootstrap_port",
        "cost",
        "labels",
        "model_id",
        "priority",
        "url",
        "worker_type",
        "worker_url",
    )
)
_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")


class WorkerRefused(HTTPError):
    """The server at the given URL is not an engine that the router can use."""

    status, type, code = 400, "invalid_request_error", "WORKER_REFUSED"


class _Workers:
    def __init__(self, router: Router) -> None:
        self._router = router

    # slime's spelling

    async def _named(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return the URL of the worker that the query or the body names, and the body."""
        content = await json_object(request)
        given = request.query_params.get("url") or request.query_params.get("worker_url")
        url = given or content.get("url") or content.get("worker_url")
        if not isinstance(url, str):
            raise BadRequest('wanted a worker: "?url=http://host:port" or {"url": "http://host:port"}')
        return worker_url(url), content

    async def add_worker(self, request: Request) -> Response:
        url, content = await self._named(request)
        _, trouble = await self._added(url, content)
        answer: dict[str, Any] = {
            "status": "success",
            "worker_urls": dict(self._router.worker_urls),
        }
        return JSON(answer if trouble is None else answer | _warning(url, trouble))

    async def _added(self, url: str, content: dict[str, Any]) -> tuple[Worker, str | None]:
        """Register the worker at ``url``. Return the worker, and None if it answered, else why it is not ready.

        Raises BadRequest, MixedWorkers and WorkerRefused.
        """
        about = _checked(content)
        await self._router.addresses.admit(url)
        known = next((worker for worker in self._router.pool if worker.url == url), None)
        if known is not None and about["worker_type"] not in (None, known.worker_type):
            about["facts"] = {BOOTSTRAP_PORT: None} | about["facts"]  # the known port belongs to the old type
        worker, trouble = await self._router.add_worker(url, **about)
        if isinstance(trouble, Refusal):
            raise WorkerRefused(trouble)
        return worker, trouble

    async def remove_worker(self, request: Request) -> Response:
        url, _ = await self._named(request)
        self._router.pool.remove(self._router.pool.find(url), "as POST /remove_worker asked")
        return JSON({"status": "success"})

    async def list_workers(self, _: Request) -> Response:
        return JSON({"urls": list(self._router.worker_urls)})

    # the gateway's spelling

    async def create(self, request: Request) -> Response:
        content = await json_object(request)
        if not isinstance(content.get("url"), str):
            raise BadRequest('wanted {"url": "http://host:port"}')
        url = worker_url(content["url"])
        worker, trouble = await self._added(url, content)
        return _accepted(worker, {} if trouble is None else _warning(worker.url, trouble))

    async def list(self, _: Request) -> Response:
        workers = [described(choice) for worker in self._router.pool for choice in worker.choices]
        counts = dict.fromkeys(("regular_count", "prefill_count", "decode_count"), 0)  # as in the gateway
        for worker in self._router.pool:
            kind = f"{worker.worker_type}_count"
            counts[kind] = counts.get(kind, 0) + len(worker.choices)
        return JSON({"workers": workers, "total": len(workers), "stats": counts})

    def _found(self, request: Request) -> Worker | Response:
        try:
            return self._router.pool.find(request.path_params["worker_id"])
        except WorkerNotFound as error:  # the gateway's shape, which is flat
            return JSON({"error": str(error), "code": error.code}, 404)

    async def show(self, request: Request) -> Response:
        found = self._found(request)
        return found if isinstance(found, Response) else JSON(described(found))

    async def update(self, request: Request) -> Response:
        """Change a worker as the gateway does: fields that are not named stay, and labels are merged."""
        found = self._found(request)
        if isinstance(found, Response):
            return found
        worker, content = found.server, await json_object(request)
        about = _checked(content)
        named = (content[name] for name in ("url", "worker_url") if content.get(name) is not None)
        if any(worker_url(str(url)) != worker.url for url in named):
            raise BadRequest(
                "the URL of a worker cannot be changed: register the new URL, and remove this worker"
            )
        if about["worker_type"] not in (None, worker.worker_type):
            raise BadRequest("worker_type cannot be changed here: register the worker again")
        worker.labels = _bounded(worker.labels | about["labels"])
        worker.facts |= about["facts"]
        if about["api_key"] is not None:
            worker.api_key = about["api_key"]
            self._router.proxy.authorize(worker)
        unknown = sorted(set(content) - _KNOWN)
        if not unknown:
            return _accepted(worker, {})
        return _accepted(worker, {"warning": f"not changed: {', '.join(unknown)[:200]}"})

    async def delete(self, request: Request) -> Response:
        found = self._found(request)
        if isinstance(found, Response):
            return found
        drain = request.query_params.get("drain", "false").lower()
        if drain not in ("true", "false", "1", "0", ""):
            raise BadRequest(f"drain: wanted true or false, got {drain[:40]!r}")
        if drain in ("true", "1"):
            self._router.registration.drain(found)
        else:
            self._router.pool.remove(found, "as DELETE /workers/ID asked")
        return JSON({"status": "accepted", "worker_id": found.id, "url": found.url}, 202)


def _accepted(worker: Worker, more: dict[str, str]) -> Response:
    location = f"/workers/{worker.id}"
    answer = {"status": "accepted", "worker_id": worker.id, "url": worker.url, "location": location}
    return JSON(answer | more, 202, {"location": location})


def _warning(url: str, trouble: str) -> dict[str, str]:
    return {"warning": f"{url} is not ready yet ({trouble}); it joins when it is ready"}


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    """Return the optional fields of a registration. Raises BadRequest."""
    kind = content.get("worker_type")
    if kind is not None and (not isinstance(kind, str) or kind not in WORKER_TYPES):
        raise BadRequest(f"worker_type: wanted one of {', '.join(WORKER_TYPES)}, got {shown(kind)}")
    port = content.get("bootstrap_port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536):
        raise BadRequest(f"bootstrap_port: wanted a port number or null, got {shown(port)}")
    model = content.get("model_id")
    if model is not None and not isinstance(model, str):
        raise BadRequest(f"model_id: wanted a string, got {shown(model)}")
    if model is not None and len(model) > _MAX_LABEL:
        raise BadRequest(f"model_id: wanted at most {_MAX_LABEL} characters, got {len(model)}")
    labels = content.get("labels")
    labels = {} if labels is None else labels
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise BadRequest(f"labels: wanted an object of strings, got {shown(labels)}")
    for name in ("priority", "cost"):  # stored as labels, as in the gateway
        number = content.get(name)
        if number is None:
            continue
        kinds, wanted = (int, "an integer") if name == "priority" else ((int, float), "a number")
        if isinstance(number, bool) or not isinstance(number, kinds) or not 0 <= number < 1 << 32:
            raise BadRequest(f"{name}: wanted {wanted} from 0 to below {1 << 32}, got {shown(number)}")
        labels = {**labels, name: str(number)}
    key = content.get("api_key")
    # httpx refuses a header that ends with a space, and its error shows the key.
    if key is not None and not (isinstance(key, str) and _KEY.fullmatch(key)):
        raise BadRequest("api_key: wanted a string of printable ASCII, without a space at its ends")
    return {
        "worker_type": kind,
        # A null is kept, too: it removes the port or the model that an earlier registration named.
        "facts": {name: content[name] for name in (BOOTSTRAP_PORT, MODEL_ID) if name in content},
        "labels": _bounded(labels),
        "api_key": key,
    }


def _bounded(labels: dict[str, str]) -> dict[str, str]:
    """Return ``labels``. Raises BadRequest for too many or too long ones."""
    longest = max((len(text) for pair in labels.items() for text in pair), default=0)
    if len(labels) > _MAX_LABELS or longest > _MAX_LABEL:
        raise BadRequest(
            f"labels: wanted at most {_MAX_LABELS}, with names and values of at most {_MAX_LABEL} characters each,"
            f" got {len(labels)} labels with up to {longest} characters"
        )
    return labels


def worker_routes(router: Router) -> list[ControlRoute]:
    """Return the routes of both APIs."""
    workers = _Workers(router)
    return [
        ControlRoute("/add_worker", workers.add_worker, methods=["POST"]),
        ControlRoute("/remove_worker", workers.remove_worker, methods=["POST"]),
        ControlRoute("/list_workers", workers.list_workers, methods=["GET"]),
        by_method("/workers", GET=workers.list, POST=workers.create),
        by_method("/workers/{worker_id:path}", GET=workers.show, PUT=workers.update, DELETE=workers.delete),
    ]
