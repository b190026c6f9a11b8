"""The order of plugins by the components that they require and provide."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["Needs", "in_order", "missing"]

#: The components that one plugin requires, with what to add to the command line for each, and those that it provides.
Needs = tuple[Mapping[str, str], Collection[str]]


def in_order(plugins: Sequence[Needs]) -> list[int]:
    """Return the places of ``plugins`` in a new order: each plugin comes after those that provide what it requires.

    Otherwise the order stays as it is. If plugins require each other in a circle, one of them comes before another one
    that it needs.
    """
    visited: set[int] = set()
    placed: list[int] = []

    def place(plugin: int) -> None:
        if plugin in visited:
            return
        visited.add(plugin)
        required = plugins[plugin][0].keys()
        for other, (_, provided) in enumerate(plugins):
            if not required.isdisjoint(provided):
                place(other)
        placed.append(plugin)

    for plugin in range(len(plugins)):
        place(plugin)
    return placed


def missing(plugins: Sequence[Needs]) -> tuple[int, str] | None:
    """Return the place of the first plugin that requires a component which no other provides, and that component."""
    for plugin, (required, _) in enumerate(plugins):
        others = [provided for other, (_, provided) in enumerate(plugins) if other != plugin]
        for component in required:
            if not any(component in provided for provided in others):
                return plugin, component
    return None
