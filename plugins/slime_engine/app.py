"""The engine as an ASGI application with SGLang's HTTP protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from slime_engine.backend import Backend
from slime_engine.control import control_routes
from slime_engine.engine import EngineHost
from slime_engine.errors import BadRequest, EngineError
from slime_engine.http import EventStream, JSONBytes, error_response, json_body, unless_gone
from slime_engine.info import info_routes
from slime_engine.language import LanguageModel
from slime_engine.model import load_model
from slime_engine.openai import openai_routes
from slime_engine.requests import parse_generate
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend
from slime_engine.transfer import PATH

__all__ = ["make_app", "make_backend_app"]


def make_app(
    settings: Settings,
    load: Callable[[], LanguageModel] = load_model,
    on_ready: Callable[[], None] | None = None,
) -> Starlette:
    """Return an application that runs its own engine during its lifespan.

    ``load`` runs in a thread and returns the model, which several applications may share.
    ``on_ready`` is called when the engine is up. ``app.state.host`` is the EngineHost.
    """
    return make_backend_app(settings, lambda: StatelessBackend(load(), settings), on_ready)


def make_backend_app(
    settings: Settings, load: Callable[[], Backend], on_ready: Callable[[], None] | None = None
) -> Starlette:
    """Return the application of an engine. ``load`` returns its backend, which no other engine may use."""
    host = EngineHost(settings, load, on_ready)

    async def generate(request: Request) -> Response:
        document = await json_body(request)
        backend = host.engine.backend
        body = parse_generate(document, backend.vocab_size, backend.obeys)
        manager = host.engine.manager
        if body.stream:
            return EventStream(manager.generate(body))
        return JSONBytes(await unless_gone(request.receive, lambda: manager.collect(body)))

    async def transfer(request: Request) -> Response:
        await request.body()  # reads the empty body, so that the next message is the disconnect
        named = request.query_params.get("dp_rank")
        try:
            rank = int(named) if named is not None else None
        except ValueError:
            raise BadRequest(f"dp_rank must be an integer, got {named!r}.") from None
        room = request.path_params["room"]
        handover = await unless_gone(request.receive, lambda: host.engine.scheduler.hand_over(room, rank))
        return JSONBytes(handover.as_json())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with host.running():
            yield

    app = Starlette(
        routes=[
            Route("/generate", generate, methods=["POST", "PUT"]),
            Route(PATH, transfer, methods=["GET"]),
            *control_routes(host),
            *info_routes(host),
            *openai_routes(host),
        ],
        exception_handlers={EngineError: error_response, ClientDisconnect: _client_closed_request},
        lifespan=lifespan,
    )
    app.state.host = host
    return app


async def _client_closed_request(request: Request, error: Exception) -> Response:
    """Return 499, nginx's status for a client that has disconnected. No client reads this response."""
    return Response(status_code=499)
