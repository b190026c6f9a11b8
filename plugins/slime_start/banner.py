"""The banner of a router that has started: its plugins, policies, workers and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_start.help_page import table
from slime_start.release import release

__all__ = ["banner"]

#: Largest number of workers that the banner names.
_SHOWN = 8


def banner(
    url: str,
    plugins: Mapping[str, str],
    policies: Sequence[str],
    workers: Sequence[str],
    pages: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the lines for a router that listens on ``url``.

    ``plugins``: by name, what each plugin does. ``policies`` are asked for a worker one after the other. ``pages``: the
    paths of pages for browsers, by their names.
    """
    more = f" and {len(workers) - _SHOWN} more" if len(workers) > _SHOWN else ""
    add = f"none yet; add one: curl -X POST '{url}/add_worker?url=http://HOST:PORT'"
    rows = [
        *((f"plugin {name}", text) for name, text in plugins.items()),
        ("policy", ", then ".join(policies) or "least requests in flight"),
        ("workers", ", ".join(workers[:_SHOWN]) + more or add),
        *((name, f"{url}{path}") for name, path in (pages or {}).items()),
    ]
    return [f"slime-router {release()}", *(f"  {line}" for line in table(rows))]
