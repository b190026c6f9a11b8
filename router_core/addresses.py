"""Rules for worker addresses: the interface that a plugin implements."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ANYWHERE", "AddressRules"]


class AddressRules(Protocol):
    """Rules that decide which servers may be workers; a plugin registers them as ``"worker_addresses"``."""

    def check(self, url: str) -> None:
        """Raise BadRequest if the text of ``url`` breaks the rules. Resolves no names."""
        ...

    async def admit(self, url: str) -> None:
        """Check the text of ``url``, and the addresses that its host resolves to. Raises BadRequest."""
        ...

    def reachable(self, url: str, address: str) -> bool:
        """Return True when a connection to the worker at ``url`` may lead to the IP address ``address``."""
        ...


class _Anywhere:
    def check(self, url: str) -> None:
        """Accept any URL."""

    async def admit(self, url: str) -> None:
        """Accept any URL."""

    def reachable(self, url: str, address: str) -> bool:
        return True


#: The rules when no plugin registers ``"worker_addresses"``: any server may be a worker.
ANYWHERE: AddressRules = _Anywhere()
