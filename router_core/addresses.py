"""The core's interface to the rules for worker addresses; a plugin has the rules."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ANYWHERE", "AddressRules"]


class AddressRules(Protocol):
    """Rules for the servers that may be workers; the component ``"worker_addresses"``."""

    def check(self, url: str) -> None:
        """Refuse ``url`` if its text alone, with no name resolved, breaks the rules. Raises BadRequest."""
        ...

    async def admit(self, url: str) -> None:
        """As :meth:`check`, and refuse what the name in it resolves to, if it resolves by now. Raises BadRequest."""
        ...

    def reachable(self, url: str, address: str) -> bool:
        """Return True when ``url`` may be at the IP address ``address``, the peer of its connection."""
        ...


class _Anywhere:
    def check(self, url: str) -> None:
        """Refuses none."""

    async def admit(self, url: str) -> None:
        """Refuses none."""

    def reachable(self, url: str, address: str) -> bool:
        return True


#: Without a plugin that has rules, any server may be a worker.
ANYWHERE: AddressRules = _Anywhere()
