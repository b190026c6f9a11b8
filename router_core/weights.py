"""Versions of the weights: opaque names with an order, and the one that the fleet serves now."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from router_core.errors import BadRequest

__all__ = ["MAX_VERSION", "WeightUpdate", "WeightVersions", "version_named"]

#: Characters that the name of a version may have.
MAX_VERSION = 256


def version_named(value: object) -> str | None:
    """The version that ``value``, a JSON value, names: a string that is not too long, or a number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    name = str(value)
    return name if 0 < len(name) <= MAX_VERSION else None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The fleet moved from ``previous`` (None: nothing was known) to ``version``. ``source`` tells who said so."""

    version: str
    previous: str | None
    source: str


class WeightVersions:
    """The versions seen so far, oldest first, and the current one.

    A version is a string (``"default"``, ``"7"``). While all are numbers they are ordered as
    numbers; otherwise as they were first seen. Changed only by functions without ``await``, so one event
    loop needs no lock.
    """

    def __init__(self) -> None:
        #: Returns the reason when the workers' weights are not alike, so that versions say nothing across workers;
        #: None when they are. A plugin whose workers may differ puts its own in this place.
        self.differ: Callable[[], str | None] = lambda: None
        self.current: str | None = None
        self._seen: dict[str, None] = {}
        self._order: list[str] = []
        self._past: dict[str, None] = {}

    def expect_one_kind(self) -> None:
        """Weights are about to change on all workers. Raises BadRequest when the workers' weights differ."""
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
        """The versions that the fleet has had, the current one included; others were only seen at a worker."""
        return self._past.keys()

    def move(self, version: str, source: str) -> WeightUpdate | None:
        """Make ``version`` the current one; None when it is already."""
        self.see(version)
        if version == self.current:
            return None
        update = WeightUpdate(version, self.current, source)
        self.current = version
        self._past[version] = None
        return update


def _magnitude(number: str) -> tuple[int, str]:
    """Orders strings of digits as numbers; ``int`` refuses more than 4,300 digits."""
    digits = number.lstrip("0")
    return len(digits), digits
