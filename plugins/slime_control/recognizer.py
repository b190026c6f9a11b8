"""Recognition of vLLM servers, which know none of the control calls.

A vLLM server has no ``/model_info``; its ``/v1/models`` are ``owned_by`` ``vllm``. With ``--api-key`` it guards ``/v1``
only: then ``/version`` answers ``{"version"}`` beside a 401.
"""

from __future__ import annotations

from typing import Any

import anyio

from router_core import Worker
from router_core.router import Router
from router_core.workers import auth_headers
from slime_control.fan_out import json_in

__all__ = ["Recognizer"]

_DEADLINE_S = 2.0
_MAX_BYTES = 1 << 20
_REFUSAL = "{url} speaks vLLM's protocol; supported: SGLang (to proxy to it only: worker_type passthrough)"


class Recognizer:
    """The component ``"recognizer"``, see :class:`router_core.joining.Recognizer`."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def objection(self, worker: Worker) -> str | None:
        """See :class:`router_core.joining.Recognizer`."""
        try:
            with anyio.fail_after(_DEADLINE_S):
                is_vllm = await self._is_vllm(worker)
        except Exception:  # httpcore on uvloop lets odd ones through
            return None  # what it is will be seen by its traffic
        return _REFUSAL.format(url=worker.url) if is_vllm else None

    async def _is_vllm(self, worker: Worker) -> bool:
        status, document = await self._get(worker, "/v1/models")
        if status == 401:
            status, document = await self._get(worker, "/version")
            return status == 200 and isinstance(document, dict) and list(document) == ["version"]
        models = document.get("data") if isinstance(document, dict) else None
        return isinstance(models, list) and any(
            isinstance(model, dict) and model.get("owned_by") == "vllm" for model in models
        )

    async def _get(self, worker: Worker, path: str) -> tuple[int, Any]:
        raw = bytearray()
        async with self._router.http.stream(
            "GET", worker.url + path, headers=auth_headers(worker), timeout=_DEADLINE_S
        ) as answer:
            async for chunk in answer.aiter_bytes():
                raw += chunk
                if len(raw) > _MAX_BYTES:
                    break
        return answer.status_code, json_in(bytes(raw))
