"""Recognition of vLLM servers, which know none of SGLang's calls.

A vLLM server has no ``/model_info``; its ``/v1/models`` are ``owned_by`` ``vllm``. With ``--api-key`` it guards ``/v1``
only: then ``/version`` answers ``{"version"}`` beside a 401.
"""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import orjson

from router_core import Worker
from router_core.joining import get

__all__ = ["objection"]

_DEADLINE_S = 2.0
_REFUSAL = "{url} speaks vLLM's protocol; supported: SGLang (to proxy to it only: worker_type passthrough)"


async def objection(worker: Worker, http: httpx.AsyncClient) -> str | None:
    """Why ``worker``, which does not introduce itself, cannot be registered; None when it can."""
    try:
        with anyio.fail_after(_DEADLINE_S):
            is_vllm = await _is_vllm(worker, http)
    except Exception:  # httpcore on uvloop lets odd ones through
        return None  # what it is will be seen by its traffic
    return _REFUSAL.format(url=worker.url) if is_vllm else None


async def _is_vllm(worker: Worker, http: httpx.AsyncClient) -> bool:
    status, body = await get(http, worker, "/v1/models")
    if status == 401:
        status, body = await get(http, worker, "/version")
        document = _json(body)
        return status == 200 and isinstance(document, dict) and list(document) == ["version"]
    document = _json(body)
    models = document.get("data") if isinstance(document, dict) else None
    return isinstance(models, list) and any(
        isinstance(model, dict) and model.get("owned_by") == "vllm" for model in models
    )


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
