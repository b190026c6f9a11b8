"""The engine's stages, and its lifecycle from loading to shutdown."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from slime_engine.backend import Backend
from slime_engine.detokenizer import Detokenizer
from slime_engine.errors import Crashed, EngineError, Unavailable
from slime_engine.journal import Journal
from slime_engine.journal_file import JournalFile
from slime_engine.scheduler import Scheduler
from slime_engine.sequence import TextDelta, TokenDelta
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend
from slime_engine.tokenizer_manager import TokenizerManager

__all__ = ["Engine", "EngineHost"]

logger = logging.getLogger(__name__)

Status = Literal["starting", "up", "ending", "crashed"]


class Engine:
    """A loaded backend with its three stages: manager → scheduler → detokenizer → manager."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        tokenizer_dir: Path,
        start_soon: Callable[[Callable[[], Awaitable[None]]], None],
        file: JournalFile | None = None,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.tokenizer_dir = tokenizer_dir
        self.journal = Journal(settings.journal_size, file.opened if file is not None else None)
        tokens: asyncio.Queue[list[TokenDelta]] = asyncio.Queue()
        texts: asyncio.Queue[list[TextDelta]] = asyncio.Queue()

        def emit(deltas: list[TokenDelta]) -> None:
            if file is not None:
                file.sampled(deltas)
            tokens.put_nowait(deltas)

        self.scheduler = Scheduler(backend, settings, self.journal, emit)
        self.detokenizer = Detokenizer(backend.tokenizer, tokens, texts)
        self.manager = TokenizerManager(backend, settings, self.scheduler, texts, start_soon)


class EngineHost:
    """The engine of one application, and its status."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Backend],
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self._load = load
        self._on_ready = on_ready
        self._status: Status = "starting"
        self._crash: Exception | None = None
        self._engine: Engine | None = None
        self._started = asyncio.Event()

    async def loaded(self) -> Engine:
        """Wait until loading has ended, and return the engine. Raises Unavailable unless the engine is up."""
        await self._started.wait()
        return self.engine

    @property
    def engine(self) -> Engine:
        """The engine; raises Unavailable unless it is up."""
        if self._status == "crashed":
            raise Unavailable(f"The engine has crashed: {self._crash!r}")
        if self._engine is None or self._status != "up":
            raise Unavailable(f"The engine is {self._status}.")
        return self._engine

    @property
    def engine_or_none(self) -> Engine | None:
        """The engine in any state, for inspection after a crash; None before it is loaded."""
        return self._engine

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the engine, run it until the block ends, and then fail all unfinished requests.

        With ``load_in_background`` the block begins at once. The engine is unavailable until its model is loaded.
        """
        with ExitStack() as cleanup:
            async with anyio.create_task_group() as tasks:
                if self.settings.load_in_background:
                    tasks.start_soon(self._guarded, lambda: self._start(tasks, cleanup))
                else:
                    await self._start(tasks, cleanup)
                try:
                    yield
                finally:
                    self._status = "ending"
                    self._started.set()
                    self._fail(Unavailable("The engine is ending."))
                    tasks.cancel_scope.cancel()

    async def _start(self, tasks: TaskGroup, cleanup: ExitStack) -> None:
        backend = await to_thread.run_sync(self._load)
        limit = backend.context_length
        if limit is not None and limit < self.settings.context_length:
            self.settings = replace(self.settings, context_length=limit)
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slime-engine-")))
        backend.tokenizer.save(directory)

        def start_soon(stage: Callable[[], Awaitable[None]]) -> None:
            tasks.start_soon(self._guarded, stage)

        path = self.settings.journal_file
        file = None if path is None else cleanup.enter_context(JournalFile(path))
        self._engine = Engine(backend, self.settings, directory, start_soon, file)
        if (config := self.settings.kv_events) is not None:
            from slime_engine.kv_publisher import KVPublisher  # needs zmq, which is an extra

            assert isinstance(backend, StatelessBackend)  # narrowing: only the backend ngram has KV events
            publisher = cleanup.enter_context(KVPublisher.bound(config, self.settings.dp_size))
            start_soon(publisher.serve_replays)
            backend.publish_to(publisher.publish)
        for rank in range(self.settings.dp_size):
            start_soon(partial(self._engine.scheduler.run, rank))
        start_soon(self._engine.detokenizer.run)
        self._status = "up"
        self._started.set()
        if self._on_ready is not None:
            self._on_ready()

    async def _guarded(self, stage: Callable[[], Awaitable[None]]) -> None:
        """Run a stage. If it raises, unfinished requests fail with Crashed (500).

        Later requests fail with Unavailable (503). The messages of both errors name the exception.
        """
        try:
            await stage()
        except Exception as error:
            logger.exception("The engine has crashed")
            self._status, self._crash = "crashed", error
            self._started.set()
            self._fail(Crashed(f"The engine has crashed: {error!r}"))

    def _fail(self, error: EngineError) -> None:
        if self._engine is not None:
            self._engine.manager.fail_all(error)
            self._engine.scheduler.fail_all(
                {"type": "abort", "message": str(error), "status_code": error.status}
            )
