"""Recognition of vLLM servers, which do not have SGLang's calls.

A vLLM server has no ``/model_info``, and the models in its ``/v1/models`` are ``owned_by`` ``vllm``. If it was started
with ``--api-key``, it protects only ``/v1``: ``/v1/models`` answers 401, and ``/version`` answers ``{"version": ...}``.
"""

from __future__ import annotations

import anyio
import httpx

from router_core import Worker
from router_core.registration import get
from slime_sglang.documents import document_in

__all__ = ["objection"]

_DEADLINE_S = 2.0
_REFUSAL = (
    "{url} speaks vLLM's protocol; supported: SGLang (with worker_type passthrough, the router only proxies)"
)


async def objection(worker: Worker, http: httpx.AsyncClient) -> str | None:
    """Return the reason why ``worker``, which has no ``/model_info``, cannot be registered; None when it can."""
    try:
        with anyio.fail_after(_DEADLINE_S):
            is_vllm = await _is_vllm(worker, http)
    except Exception:  # of many kinds with httpcore on uvloop
        return None  # unknown: it may register
    return _REFUSAL.format(url=worker.url) if is_vllm else None


async def _is_vllm(worker: Worker, http: httpx.AsyncClient) -> bool:
    status, body = await get(http, worker, "/v1/models")
    if status == 401:
        status, body = await get(http, worker, "/version")
        return status == 200 and list(document_in(body) or ()) == ["version"]
    models = (document_in(body) or {}).get("data")
    return isinstance(models, list) and any(
        isinstance(model, dict) and model.get("owned_by") == "vllm" for model in models
    )
