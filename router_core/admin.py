"""The core's own routes: health of the router, and the fleet's weight version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router_core.errors import BadRequest
from router_core.router import Router
from router_core.routes import JSON, ControlRoute, by_method, json_object, shown
from router_core.weights import MAX_VERSION

__all__ = ["admin_routes"]


class _Admin:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, _: Request) -> Response:
        pool = self._router.pool
        return JSON({"status": "ok", "healthy_workers": pool.healthy, "total_workers": len(pool)})

    async def readiness(self, _: Request) -> Response:
        pool = self._router.pool
        if self._router.stopping.is_set():
            return JSON({"status": "not ready", "reason": "the router is shutting down"}, 503)
        if pool.missing is not None:
            reason = f"no {pool.missing} can take requests (registered: {len(pool)})"
            return JSON({"status": "not ready", "reason": reason}, 503)
        return JSON({"status": "ready", "healthy_workers": pool.healthy, "total_workers": len(pool)})

    async def weight_version(self, _: Request) -> Response:
        router = self._router
        versions = {worker.url: worker.weight_version for worker in router.pool}
        return JSON({"weight_version": router.weights.current, "workers": versions})

    async def announce(self, request: Request) -> Response:
        content = await json_object(request)
        version = content.get("weight_version")
        name = str(version) if isinstance(version, str | int) and not isinstance(version, bool) else ""
        if not 0 < len(name) <= MAX_VERSION:
            raise BadRequest(
                f'wanted {{"weight_version": "7"}}, at most {MAX_VERSION} characters, got {shown(version)}'
            )
        self._router.weights.expect_one_kind()
        await self._router.announce_weights(name, "announced")
        return await self.weight_version(request)


def admin_routes(router: Router) -> list[ControlRoute]:
    """The core's routes."""
    admin = _Admin(router)
    return [
        ControlRoute("/health", admin.health, methods=["GET"]),
        ControlRoute("/liveness", admin.health, methods=["GET"]),
        ControlRoute("/readiness", admin.readiness, methods=["GET"]),
        by_method("/weight_version", GET=admin.weight_version, POST=admin.announce),
    ]
