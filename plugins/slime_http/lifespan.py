"""The lifespan of an application under uvicorn."""

from __future__ import annotations

import asyncio
import logging

import uvicorn
from uvicorn.lifespan.on import LifespanOn, LifespanSendMessage

from slime_http.client_connection import Observer
from slime_http.errors import RouterError, StartupError

__all__ = ["APP", "OBSERVERS", "Lifespan"]

#: Extension of the lifespan's scope: the list of the server's observers, to which the application may append.
OBSERVERS = "slime_http.observers"
#: Extension of the lifespan's scope: the application that will get the requests. An outermost layer that handles no
#: requests stores its inner application here, which saves a call for each request.
APP = "slime_http.app"

logger = logging.getLogger(__name__)


class Lifespan(LifespanOn):
    """Runs the lifespan, and raises a StartupError of the application as it is. Other errors are logged.

    The log has one line for a RouterError, which is raised on purpose and has a clear message, else a traceback.
    """

    _error: StartupError | None = None

    def __init__(self, config: uvicorn.Config, observers: list[Observer]) -> None:
        super().__init__(config)
        self._extensions = {OBSERVERS: observers, APP: config.loaded_app}

    async def startup(self) -> None:
        """Start the application. Raises StartupError."""
        self._task = asyncio.get_running_loop().create_task(self.main())  # it may outlast any task group
        await self.receive_queue.put({"type": "lifespan.startup"})
        await self.startup_event.wait()
        if self.startup_failed or self.error_occurred:
            raise self._error or StartupError("the application cannot start; the log says why")
        self.config.loaded_app = self._extensions[APP]

    async def main(self) -> None:
        """Call the application. An error of the application is logged, except the StartupError of a failed start."""
        version = {"version": self.config.asgi_version, "spec_version": "2.0"}
        try:
            await self.config.loaded_app(
                {
                    "type": "lifespan",
                    "asgi": version,
                    "state": self.state,
                    "extensions": self._extensions,
                },
                self.receive,
                self.send,
            )
        except BaseException as error:
            self.error_occurred = True
            reason = _only_reason(error)
            self._error = reason if self.startup_failed and isinstance(reason, StartupError) else None
            if self._error is None and isinstance(reason, RouterError):
                logger.error("the application ends: %s", reason)
            elif self._error is None:
                logger.error("the application's lifespan failed", exc_info=error)
        finally:
            self.startup_event.set()
            self.shutdown_event.set()

    async def send(self, message: LifespanSendMessage) -> None:
        """Take a message of the application.

        The text of a failure is not logged: usually the application raises the error next, and :meth:`main` logs it.
        """
        if message["type"] == "lifespan.startup.failed":
            self.startup_failed = True
            self._error = StartupError(f"the application cannot start: {message.get('message', '')}")
        elif message["type"] == "lifespan.shutdown.failed":
            self.shutdown_failed = True
        else:
            await super().send(message)


def _only_reason(error: BaseException) -> BaseException:
    """Return ``error``, or the only error in a group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error
