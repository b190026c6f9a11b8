"""The interface of the rules for worker addresses; a plugin implements them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ANYWHERE", "AddressRules"]


class AddressRules(Protocol):
    """Rules for the servers that may be workers; the component ``"worker_addresses"``."""

    def check(self, url: str) -> None:
        """Refuse ``url`` if its text breaks the rules; resolves no names. Raises BadRequest."""
        ...

    async def admit(self, url: str) -> None:
        """As :meth:`check`, and refuse a name that resolves now to a forbidden address. Raises BadRequest."""
        ...

    def reachable(self, url: str, address: str) -> bool:
        """Return True when ``url`` may be at the IP address ``address``, the peer of its connection."""
        ...


class _Anywhere:
    def check(self, url: str) -> None:
        """Accept any URL."""

    async def admit(self, url: str) -> None:
        """Accept any URL."""

    def reachable(self, url: str, address: str) -> bool:
        return True


#: The rules without such a plugin: any server may be a worker.
ANYWHERE: AddressRules = _Anywhere()
