"""The interface of a client of a remote store, and its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slime_tiered_store.tiers.block_header import Buffer

__all__ = ["NOTES_FOLDER", "RemoteClient", "RemoteError"]

#: The only folder whose objects are listed. The other folders have blocks, which are too many to list.
NOTES_FOLDER = "notes"


class RemoteError(Exception):
    """A call failed. ``retry``: the call may succeed if it is repeated. ``is_full``: the store has no space left."""

    def __init__(self, message: str, *, retry: bool = True, is_full: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        self.is_full = is_full


class RemoteClient(Protocol):
    """Named objects in a remote store. All calls may be cancelled, and raise RemoteError.

    An object is written whole or not at all. ``url``: the address of the store, for messages, without a password.
    ``calls_at_once``: the most calls that should be under way. ``objects_per_put``: the number of small objects that
    one ``put`` should write; 1 for a store that cannot write several at once.
    """

    url: str
    calls_at_once: int
    objects_per_put: int

    async def get(self, name: str) -> Buffer | None:
        """Return an object, or None when the store says that there is none."""

    async def put(self, objects: Mapping[str, bytes]) -> None:
        """Write objects by name, in place of earlier ones. After an error, any of them may have been written."""

    async def exists(self, name: str) -> bool:
        """Return True if the store says that there is an object."""

    async def list(self, folder: str) -> list[str]:
        """Return those names of objects that begin with ``folder`` and a slash, in any order.

        A client need not support any folder except NOTES_FOLDER.
        """

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Names without an object are ignored."""

    async def is_there(self, format_name: str) -> bool:
        """Return True if the store itself is there. Other calls take a missing bucket or directory for an empty store.

        ``format_name``: the name of an object that each store gets when it is first opened.
        """

    async def aclose(self) -> None:
        """Close connections."""
