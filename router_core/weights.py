"""Weight versions: opaque names with an order, and the version that the fleet serves now."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from router_core.errors import BadRequest

__all__ = ["MAX_VERSION", "WeightUpdate", "WeightVersions", "version_named"]

#: Largest number of characters in the name of a version.
MAX_VERSION = 256


def version_named(value: object) -> str | None:
    """Return the version that a JSON ``value`` names, a short string or an integer; None if it names no version."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    name = str(value)
    return name if 0 < len(name) <= MAX_VERSION else None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The fleet's move from ``previous`` (None: unknown) to ``version``; ``source``: the call or probe behind it."""

    version: str
    previous: str | None
    source: str


class WeightVersions:
    """The versions seen so far, oldest first, and the current version.

    A version is a string (``"default"``, ``"7"``). If all versions are numbers, they are ordered as numbers; otherwise
    they are in the order in which they were first seen. No change of this object has an ``await`` in the middle, so on
    one event loop it needs no lock.
    """

    def __init__(self) -> None:
        #: Returns the reason why the workers' versions cannot be compared, such as different models; None: they can.
        #: A plugin that allows several models replaces this function.
        self.differ: Callable[[], str | None] = lambda: None
        self.current: str | None = None
        self._seen: dict[str, None] = {}
        self._order: list[str] = []
        self._past: dict[str, None] = {}

    def expect_one_kind(self) -> None:
        """Check, before weights change on all workers, that :attr:`differ` gives no reason. Raises BadRequest."""
        reason = self.differ()
        if reason is not None:
            raise BadRequest(reason)

    def see(self, version: str) -> None:
        """Note that ``version`` exists."""
        if version not in self._seen:
            self._seen[version] = None
            seen = list(self._seen)
            numbers = all(name.isascii() and name.isdigit() for name in seen)
            self._order = sorted(seen, key=_magnitude) if numbers else seen

    @property
    def ordered(self) -> tuple[str, ...]:
        """All versions seen, oldest first."""
        return tuple(self._order)

    @property
    def past(self) -> Collection[str]:
        """The fleet's versions, the current one included; a version that only single workers had is left out."""
        return self._past.keys()

    def move(self, version: str, source: str) -> WeightUpdate | None:
        """Make ``version`` the current version. Returns None if it was the current version already."""
        self.see(version)
        if version == self.current:
            return None
        update = WeightUpdate(version, self.current, source)
        self.current = version
        self._past[version] = None
        return update


def _magnitude(number: str) -> tuple[int, str]:
    """Return a key that orders strings of digits as numbers; ``int`` refuses more than 4,300 digits."""
    digits = number.lstrip("0")
    return len(digits), digits
