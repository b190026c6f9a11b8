"""Bodies of control calls: the recipients and the weight version that they name, and the body for each recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from router_core import Worker
from router_core.errors import BadRequest
from router_core.pool import WorkerPool
from router_core.request import Request
from router_core.routes import shown
from router_core.weights import MAX_VERSION, version_named
from router_core.workers import worker_url

__all__ = [
    "base_offset",
    "begins_update",
    "given_bodies",
    "is_delta",
    "named_version",
    "names_read",
    "offset_bodies",
]

#: No version is read from a body larger than this, since parsing it would block the event loop. The workers are asked
#: for their version after such a call.
_PARSED_BYTES = 1 << 20
#: Name of the member with one body per worker. These bytes never occur inside a tensor: base64 has no quotation marks.
_NAMED = b'"workers"'
_DELTA = re.compile(rb'"load_format"[ \t\r\n]*:[ \t\r\n]*"[^"]*delta')


def given_bodies(request: Request, pool: WorkerPool) -> dict[Worker, bytes] | None:
    """Return the bodies of ``{"workers": {url: body}}``; None when one body is for all workers.

    Raises BadRequest and WorkerNotFound.
    """
    if _NAMED not in request.body:
        return None
    document = request.json()
    if not isinstance(document, dict) or "workers" not in document:
        return None
    given = document["workers"]
    if not isinstance(given, dict) or not given or not all(isinstance(body, dict) for body in given.values()):
        raise BadRequest('wanted {"workers": {url: body}}, a JSON object for at least one worker')
    if len(document) > 1:
        others = ", ".join(sorted(set(document) - {"workers"}))
        raise BadRequest(f'"workers" must be the only member, got also {others}')
    bodies = {pool.find(worker_url(url)): _written(body) for url, body in given.items()}
    if len(bodies) < len(given):
        raise BadRequest(f'"workers": wanted each worker once, got {", ".join(given)[:200]}')
    return bodies


def named_version(request: Request) -> str | None:
    """Return the version that the request names for all workers.

    Returns None unless the request names one version for all of them, in a body of at most ``_PARSED_BYTES``.
    Raises BadRequest for a value that is no version, such as an empty string: an engine would accept it, and then name
    no version itself.
    """
    versions = {_version(body) for body in _each(request)}
    return versions.pop() if len(versions) == 1 else None


def _version(body: dict[str, Any]) -> str | None:
    name = "weight_version" if "weight_version" in body else "new_version"
    given = body.get(name)
    version = version_named(given)
    if version is None and given is not None:
        raise BadRequest(
            f'{name}: wanted a version such as "7", at most {MAX_VERSION} characters, got {shown(given)}'
        )
    return version


def names_read(request: Request) -> tuple[bytes, ...]:
    """Return keys for :meth:`Router.read_ahead`, which parses a body above 1 MiB only if it may have one of them.

    Returns no keys for a smaller body: :meth:`Router.read_ahead` then parses it, if parsing it is long work.
    """
    return (b"workers", b"rank_offset") if len(request.body) > _PARSED_BYTES else ()


def begins_update(request: Request) -> bool:
    """Return True when the request announces an update but brings no weights itself."""
    if request.path == "/post_process_weights":
        return any(body.get("restore_weights_before_load") is True for body in _each(request))
    return request.path == "/begin_weight_update"


def is_delta(request: Request) -> bool:
    """Return True when the body, of any size, brings changes to the present weights instead of whole weights.

    slime calls such an update ``distributed_delta``.
    """
    return _DELTA.search(request.body) is not None


def _each(request: Request) -> list[dict[str, Any]]:
    """Return each worker's body, or the single body for all workers.

    Returns an empty list for a body that is too large to parse, or is no JSON object.
    """
    if len(request.body) > _PARSED_BYTES:
        return []
    document = request.json() if request.body else {}
    if not isinstance(document, dict):
        return []
    each = document.get("workers") if _NAMED in request.body else None
    return [document] if each is None else list(each.values())


def base_offset(request: Request) -> int | None:
    """Return the ``rank_offset`` of a body for all workers, which is the first worker's offset.

    Returns None if the body has no ``rank_offset``. Raises BadRequest.
    """
    document = request.json() if request.body else {}
    if not isinstance(document, dict) or "rank_offset" not in document:
        return None
    offset = document["rank_offset"]
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise BadRequest(f"rank_offset: wanted a number from 0 on, got {offset!r:.80}")
    return offset


def offset_bodies(base: dict[str, Any], sizes: Sequence[tuple[Worker, int]]) -> dict[Worker, bytes]:
    """Return ``base`` as JSON for each worker, where each ``rank_offset`` follows the ranks of the previous worker.

    ``sizes``: the workers, each with its number of ranks. Raises BadRequest.
    """
    bodies = {}
    offset = base["rank_offset"]
    for worker, size in sizes:
        bodies[worker] = _written(base | {"rank_offset": offset})
        offset += size
    world = base.get("world_size")
    if isinstance(world, int) and world < offset:
        told = ", ".join(f"{worker.url} has {size}" for worker, size in sizes)
        raise BadRequest(
            f"world_size: wanted at least {offset} for the ranks of all workers ({told}), got {world}; raise it,"
            ' or send a body for each worker: {"workers": {url: body}}'
        )
    return bodies


def _written(body: dict[str, Any]) -> bytes:
    """Return ``body`` as JSON. Raises BadRequest: orjson cannot write all that it reads."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise BadRequest(f"a worker's body cannot be written: {error}") from None
