"""Routes by which a trainer or a router controls the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from slime_engine.backend import WeightsRefused
from slime_engine.engine import EngineHost
from slime_engine.errors import BadRequest
from slime_engine.fields import boolean, string, strings
from slime_engine.http import JSONBytes, json_body
from slime_engine.scheduler import PauseMode

__all__ = ["control_routes"]

Handler = Callable[[Request], Awaitable[Response]]

#: SGLang's tags of memory (``GPU_MEMORY_ALL_TYPES``).
_MEMORY = ("kv_cache", "weights", "cuda_graph")
_UPDATES = ("disk", "tensor", "distributed", "ipc")


def control_routes(host: EngineHost) -> list[Route]:
    """Return the routes that abort, pause, continue, change weights, flush the cache and release memory."""

    async def abort_request(request: Request) -> Response:
        body = await json_body(request)
        rid = string(body, "rid") or ""
        if boolean(body, "abort_all") or rid:
            host.engine.scheduler.abort_prefix("" if boolean(body, "abort_all") else rid)
        return Response()

    async def pause_generation(request: Request) -> Response:
        mode = string(await json_body(request), "mode") or "abort"
        if mode not in get_args(PauseMode):
            raise BadRequest(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}.")
        host.engine.scheduler.pause(cast(PauseMode, mode))
        return JSONBytes({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(request: Request) -> Response:
        await json_body(request, required=False)
        host.engine.scheduler.resume()
        return JSONBytes({"status": "ok", "message": "Generation continued successfully."})

    async def flush_cache(request: Request) -> Response:
        scheduler = host.engine.scheduler
        busy = scheduler.running or (scheduler.waiting and not scheduler.paused)
        if not busy:
            await host.engine.backend.flush_cache()
        note = "(When there are running or waiting requests, the operation will not be performed.)"
        return PlainTextResponse(
            f"{'Cache not flushed' if busy else 'Cache flushed'}.\n{note}\n", 400 if busy else 200
        )

    async def update_weights(request: Request) -> Response:
        body = await json_body(request)
        if request.url.path.endswith("_disk") and not string(body, "model_path"):
            raise BadRequest("model_path is required.")
        scheduler, backend = host.engine.scheduler, host.engine.backend
        source = request.url.path.rpartition("_")[2]
        if boolean(body, "abort_all_requests"):
            scheduler.abort_prefix("")
        paused_requests = len(scheduler.running) if scheduler.paused else 0
        version = string(body, "weight_version")
        try:
            await scheduler.update_weights(version, lambda: backend.update_weights(source, body))
        except WeightsRefused as refused:
            return JSONBytes({"success": False, "message": str(refused)}, 400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return JSONBytes({"success": True, "message": message, "num_paused_requests": paused_requests})

    async def update_weight_version(request: Request) -> Response:
        body = await json_body(request)
        version = string(body, "new_version")
        if version is None:
            raise BadRequest("new_version is required.")
        scheduler = host.engine.scheduler
        if boolean(body, "abort_all_requests", True):
            scheduler.abort_prefix("")
        scheduler.version = version
        message = f"Weight version updated to {version}"
        return JSONBytes({"success": True, "message": message, "new_version": version})

    async def weights_group(request: Request) -> Response:
        await json_body(request)
        host.engine  # noqa: B018  # raises unless the engine is up
        return JSONBytes({"success": True, "message": "There is nothing to connect in an embedded engine."})

    # SGLang's handlers for memory return nothing, which FastAPI writes as null.

    async def release_memory(request: Request) -> Response:
        tags = strings(await json_body(request, required=False), "tags") or _MEMORY
        host.engine.scheduler.release_memory(tags)
        if "kv_cache" in tags:
            await host.engine.backend.flush_cache()
        return JSONBytes(None)

    async def resume_memory(request: Request) -> Response:
        scheduler = host.engine.scheduler
        tags = strings(await json_body(request, required=False), "tags")
        scheduler.resume_memory(tags or (*scheduler.released,))
        return JSONBytes(None)

    handlers: dict[str, Any] = {
        "/abort_request": abort_request,
        "/pause_generation": pause_generation,
        "/continue_generation": continue_generation,
        "/update_weight_version": update_weight_version,
        "/init_weights_update_group": weights_group,
        "/destroy_weights_update_group": weights_group,
        "/release_memory_occupation": release_memory,
        "/resume_memory_occupation": resume_memory,
        **{f"/update_weights_from_{source}": update_weights for source in _UPDATES},
    }
    return [
        Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
        *(Route(path, handler, methods=["POST"]) for path, handler in handlers.items()),
    ]
