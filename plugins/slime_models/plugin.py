"""The plugin: reads the model that a request names, and sends the request to workers of that model only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router_core import Exchange, HTTPError, SettingsError, Worker, hookimpl
from router_core.errors import BadRequest, NoWorker
from router_core.request import Request
from router_core.router import Router
from router_core.routes import JSON
from slime_sglang.facts import model_id
from slime_sglang.introduction import Introduction

__all__ = ["ModelNotFound", "Models", "add_options", "make_plugin", "requires"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-igw",
        action="store_true",
        help="workers may serve several models: a request goes to workers of the model that it names",
    )


def requires(options: argparse.Namespace) -> dict[str, str]:
    """Return the component that asks workers for their models, and the flag that adds it."""
    return {"introduction": "--plugin sglang"} if options.enable_igw else {}


def make_plugin(options: argparse.Namespace) -> Models | None:
    """Return the plugin, or None without ``--enable-igw``."""
    return Models() if options.enable_igw else None


class ModelNotFound(HTTPError):
    """No worker serves a model of that name."""

    status, type, code = 404, "not_found_error", "model_not_found"


class Models:
    """Routes by model. The model of a worker is its registered model, else the model that it reports."""

    _router: Router  # from setup on

    def __init__(self) -> None:
        self._created = int(time.time())

    @hookimpl(trylast=True)  # after all plugins have registered their components
    def setup(self, router: Router) -> None:
        """Make the component ``"introduction"`` ask workers for their models.

        Raises SettingsError if a plugin records trajectories, since such a plugin knows only one model. Raises
        MissingComponent without a plugin that asks workers.
        """
        introduction: Introduction = router.components.get("introduction", "add --plugin sglang")
        if "trajectories" in router.components:
            raise SettingsError(
                "--enable-igw: the tokens of all models would be recorded as tokens of the model of --hf-checkpoint;"
                " start a router for each model, or do without --plugin radix_cache"
            )
        introduction.asks_model = True
        router.weights.differ = self._differing
        self._router = router

    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        return [
            Route("/v1/models", self._list, methods=["GET"]),
            Route("/v1/models/{model:path}", self._show, methods=["GET"]),
        ]

    @hookimpl(tryfirst=True)  # uses the workers at the request's arrival, not those after its wait for a slot
    async def pre_request(self, exchange: Exchange) -> None:
        request, models = exchange.request, self._served()
        if request.is_long_work:
            await self._router.read_ahead(exchange, b"model")
        model = _named(request)
        if model is None:
            if len(models) == 1:
                exchange.worker_filter = _of(models[0])
            elif models and request.method in ("POST", "PUT"):  # SGLang generates for both
                exchange.worker_filter = _undecided(models)
            return
        if model not in models:
            self._refuse(model, models)
        exchange.worker_filter = _of(model)

    def _refuse(self, model: str, models: Sequence[str]) -> NoReturn:
        pool = self._router.pool
        if not len(pool) or any(model_id(worker) is None and worker.state == "joining" for worker in pool):
            raise NoWorker(f"no worker serves the model {model!r} yet (registered: {pool.standings()})")
        raise ModelNotFound(f"no worker serves the model {model!r}; known: {', '.join(models) or 'none'}")

    def _served(self) -> list[str]:
        """Return the models of all workers, in the order of registration."""
        return list(
            dict.fromkeys(model for worker in self._router.pool if (model := model_id(worker)) is not None)
        )

    def _differing(self) -> str | None:
        """See :attr:`WeightVersions.differ`. All unknown models count as one more model."""
        models = {model_id(worker) for worker in self._router.pool}
        if len(models) < 2:
            return None
        told = ", ".join(sorted(model or "one yet unknown" for model in models))
        return (
            f"workers of several models are registered ({told}), so weights cannot change on all of them: call the"
            " engines of one model directly, or use a router for each model"
        )

    # Routes for OpenAI's clients.

    async def _list(self, _: HTTPRequest) -> Response:
        return JSON({"object": "list", "data": [self._described(name) for name in self._served()]})

    async def _show(self, request: HTTPRequest) -> Response:
        name = request.path_params["model"]
        if name not in self._served():
            raise ModelNotFound(f"no worker serves the model {name!r}")
        return JSON(self._described(name))

    def _described(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "sglang", "root": name}


def _of(model: str) -> Callable[[Worker], bool]:
    return lambda worker: model_id(worker) == model


def _undecided(models: Sequence[str]) -> Callable[[Worker], bool]:
    """Return a filter that refuses a request without a model, but only when a worker is chosen for it."""

    def worker_filter(worker: Worker) -> bool:
        raise BadRequest(f'name one of these models as {{"model": ...}}: {", ".join(models)}')

    return worker_filter


def _named(request: Request) -> str | None:
    """Return the ``model`` in the body of ``request``; None without one, and for a body that is not JSON."""
    name = request.field("model")
    return name if isinstance(name, str) else None
