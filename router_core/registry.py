"""Components that plugins share, by name."""

from __future__ import annotations

from typing import Any

from router_core.errors import MissingComponent, PluginError

__all__ = ["ComponentRegistry"]


class ComponentRegistry:
    """Named objects that one plugin offers and another one uses (``"tokenizer"``, ``"trajectories"``).

    Plugins register and look up components in ``setup``, so a missing component ends the start.
    """

    def __init__(self) -> None:
        self._components: dict[str, Any] = {}

    def register(self, name: str, component: object) -> None:
        """Offer ``component`` as ``name``. Raises PluginError when the name is empty or taken."""
        if not name.strip():
            raise PluginError("a component needs a name")
        if name in self._components:
            raise PluginError(f"component {name!r} is registered twice")
        self._components[name] = component

    def get(
        self, name: str, cure: str = "load the plugin that offers it, earlier on the command line"
    ) -> Any:
        """Return the component ``name``. Raises MissingComponent; its message ends with ``cure``."""
        try:
            return self._components[name]
        except KeyError:
            known = ", ".join(sorted(self._components)) or "none"
            raise MissingComponent(f"component {name!r} is missing (registered: {known}); {cure}") from None

    def find(self, name: str) -> Any | None:
        """Return the component ``name``, or None."""
        return self._components.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._components
