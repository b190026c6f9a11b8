"""Reference of the router's metrics, from the registry that answers scrapes."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

from prometheus_client.metrics_core import Metric

from docs.generate.tables import Table, code, text
from router_core.cli import build

_INTRODUCTION = """\
# Metrics

Made from the registry of a router with all plugins that have metrics.
`GET /metrics` has a metric only if its plugin is loaded.
[metrics](../plugins/metrics.md) has more about each metric, and says which one answers which question.

"""
#: With these, each plugin that has metrics has all of them.
_ALL = (
    *("--plugin", "engine", "--plugin", "radix_cache", "--plugin", "openai", "--plugin", "r3"),
    *("--plugin", "tiered_store", "--policy", "cache_aware", "--kv-events", "--max-concurrent-requests", "1"),
)


def page() -> str:
    """Return the page, with a table for each plugin."""
    router, _ = build(_ALL)
    metrics: Any = router.components.get("metrics")
    owners = {name: offered.read.__module__ for name, offered in metrics._offered.items()}
    tables: dict[str, Table] = defaultdict(lambda: Table("metric", "type", "labels", ""))
    logging.disable()  # numbers of a router that does not serve cannot be read, and each failure is logged
    found = metrics.collect()
    logging.disable(logging.NOTSET)
    unread = [offered for offered in metrics._offered.values() if offered.name not in map(_name, found)]
    families = [
        *found,
        *(offered.kind(offered.name, offered.help, labels=offered.labels) for offered in unread),
    ]
    for family in sorted(families, key=_name):
        name = _name(family)
        owner = "the process" if name.startswith("process_") else _plugin(owners.get(name, "slime_metrics"))
        labels = ", ".join(map(code, getattr(family, "_labelnames", ())))
        tables[owner].add(code(name), family.type, labels, f"{text(family.documentation)}.")
    sections = [f"## {owner}\n\n{_about(owner)}{table}" for owner, table in sorted(tables.items())]
    return _INTRODUCTION + "\n".join(sections)


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _plugin(module: str) -> str:
    return module.partition(".")[0].removeprefix("slime_")


def _about(owner: str) -> str:
    return "" if owner == "the process" else f"[The page of the plugin](../plugins/{owner}.md).\n\n"
