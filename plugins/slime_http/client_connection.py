"""The interface through which requests call the client's connection on which they came."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from slime_http.observed import ObservedRequest
from slime_http.write_flow import WriteFlow

if TYPE_CHECKING:
    from slime_http.server_request import ServerRequest

__all__ = ["ClientConnection", "Observer"]

#: Called with a request when the application has returned. An observer must not raise.
Observer: TypeAlias = Callable[[ObservedRequest], object]


class ClientConnection(ABC):
    """The connection on which a request came."""

    transport: asyncio.Transport
    flow: WriteFlow
    observers: Sequence[Observer]
    #: Returns the event loop's time in seconds.
    time: Callable[[], float]

    @abstractmethod
    def read_on(self) -> None:
        """Resume reading: the application waits for more of the body."""

    @abstractmethod
    def continued(self) -> None:
        """Start the deadline for the body: "100 Continue" was sent."""

    @abstractmethod
    def answered(self, request: ServerRequest) -> None:
        """Note the time when the answer to ``request`` was written. Then go on to the next request, or close."""

    @abstractmethod
    def ended(self, request: ServerRequest) -> None:
        """Forget the task of ``request``: the application has returned."""
