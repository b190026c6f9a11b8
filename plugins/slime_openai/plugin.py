"""The plugin: the requests that it answers, and OpenAI's form for errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import orjson

from router_core import hookimpl
from router_core.errors import HTTPError
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.router import Router
from slime_journal.record_log import RecordLog
from slime_openai.chat import Chat
from slime_openai.completions import Completions
from slime_openai.errors import error_body, error_object
from slime_openai.generating import JSON
from slime_openai.models import Models
from slime_openai.parsing.formats import Formats
from slime_openai.prompts.known_messages import KnownMessages
from slime_openai.prompts.log_records import CHATS, reader
from slime_openai.prompts.logged_history import LoggedHistory
from slime_openai.prompts.parents import Parents
from slime_openai.prompts.rendering import Renderer
from slime_openai.prompts.stored_history import StoredHistory
from slime_openai.prompts.turn_tokens import Prompts
from slime_openai.prompts.turns import Turns
from slime_openai.requests.unknown_parameters import UnknownParameters
from slime_openai.responses.evidence import LostSessions, Ownership
from slime_openai.responses.outputs import error_message
from slime_openai.settings import Settings

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SideRecords, TokenRows

__all__ = ["OpenAI"]

logger = logging.getLogger(__name__)

_MODELS = "/v1/models"
#: Marks a worker's own reply to a ``/v1/`` request: the router does not know its tokens.
_NOT_EXACT = (b"x-slime-exact", b"false")
_LARGEST_ERROR_BYTES = 1 << 20


class OpenAI:
    """Answers ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``. Marks workers' own ``/v1/`` replies."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @hookimpl
    def setup(self, router: Router) -> None:
        """Look up the components of ``radix_cache``, and make the parts of this plugin."""
        settings = self._settings
        self._pool = router.pool
        self._components = router.components
        encoder = router.components.get("encoder")
        tokenizer = router.components.get("tokenizer")
        verdicts = router.components.get("verdicts")
        ownership: Ownership = router.components.get("ownership")
        renderer = Renderer(tokenizer, settings.chat_template, router.threads)
        self._reader = partial(reader, tokenizer, renderer.source, renderer.traits)
        self._history = history = self._begin_history(router)
        self._models = Models(router)
        unknown = UnknownParameters(settings.unknown_parameters)
        self._chat = Chat(
            router,
            tokenizer,
            Prompts(renderer, encoder, tokenizer, Parents(history, renderer, ownership), settings.history),
            Turns(history, tokenizer, router.components.get("decode")),
            Formats(
                renderer.source,
                tokenizer,
                calls=settings.tool_call_parser,
                reasoning=settings.reasoning_parser,
            ),
            self._models,
            verdicts,
            unknown,
            KnownMessages(settings.known_messages_max_bytes),
        )
        self._completions = Completions(router, tokenizer, self._models, verdicts, unknown)

    def _begin_history(self, router: Router) -> LoggedHistory | StoredHistory:
        """Return the history. It has a log if ``radix_cache`` has a directory for logs. Raises StartupError."""
        limit = max(0, self._settings.history_max_bytes - self._settings.known_messages_max_bytes)
        lost: LostSessions = router.components.get("lost_sessions")
        if "log_directory" not in router.components:
            return StoredHistory(limit, lost)
        log = RecordLog(router.components.get("log_directory"), CHATS, self._reader())
        return LoggedHistory(limit, lost, log)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """With a log, rewrite files with many evicted turns. Without a log, keep turns in the store, if there is one.

        The store is the place to which ``radix_cache`` demotes trajectories.
        """
        history = self._history
        if isinstance(history, StoredHistory):
            records: SideRecords = router.components.get("side_records")
            if records.is_on:
                history.keep_in(records, self._reader())
            yield
            return
        logger.info("the log had %d turns of conversations", len(history))
        router.tasks.start_soon(history.tidy)
        try:
            yield
        finally:
            history.close()

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        """Answer requests for chats, completions and models. Errors have OpenAI's form.

        Chats with media and all other requests go to a worker. With passthrough workers, all requests go to a worker.
        """
        request = exchange.request
        path = request.path
        if not path.startswith("/v1/") or self._pool.passthrough:
            return None
        rows: TokenRows | None = self._components.find("token_rows")  # its plugin may be loaded later
        if rows is not None:
            await rows.inject(exchange)
        try:
            if request.method == "POST" and path == "/v1/chat/completions":
                return await self._chat.answer(exchange)
            if request.method == "POST" and path == "/v1/completions":
                return await self._completions.answer(exchange)
            if request.method == "GET" and path == _MODELS:
                return Reply.from_json(self._models.all())
            if request.method == "GET" and path.startswith(f"{_MODELS}/"):
                return Reply.from_json(self._models.one(path.removeprefix(f"{_MODELS}/")))
        except HTTPError as error:
            return Reply(error.status, [JSON, *error.headers], error_body(error))
        return None

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        """Mark a worker's own answer as not exact, since its tokens are unknown.

        Put a worker's error into OpenAI's form, unless the workers are passthrough workers.
        """
        reply = exchange.reply
        if reply is None or exchange.worker is None or not exchange.request.path.startswith("/v1/"):
            return
        if reply.status < 400:
            reply.headers = [*reply.headers, _NOT_EXACT]
            return
        if self._pool.passthrough:
            return
        body = await reply.read(_LARGEST_ERROR_BYTES)
        try:
            document = orjson.loads(body)
            if isinstance(document["error"]["message"], str):
                return
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass  # another form: SGLang's flat object, FastAPI's, or a proxy's page
        said = error_message(body) or f"The worker answered {reply.status} to {exchange.request.path}."
        reply.headers = [pair for pair in reply.headers if pair[0] != b"content-type"] + [JSON]
        reply.replace_body(orjson.dumps(error_object(reply.status, said)))
