"""Reference of the router's metrics, from the registry that answers scrapes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import anyio
from prometheus_client.metrics_core import Metric

from docs.generate.tables import Table, code, text
from router_core.cli import build

_INTRODUCTION = """\
# Metrics

Made from the registry of a router with all plugins that have metrics.
`GET /metrics` has a metric only if its plugin is loaded.
[metrics](../plugins/metrics.md) has more about each metric, and says which metric answers which question.

"""
#: With these flags, each plugin that has metrics has all of its metrics.
_ALL = (
    *("--plugin", "engine", "--plugin", "radix_cache", "--plugin", "openai", "--plugin", "r3"),
    *("--plugin", "tiered_store", "--policy", "auto", "--session-affinity", "soft", "--kv-events"),
    *("--max-concurrent-requests", "1"),
)


def page() -> str:
    """Return the page, with a table for each plugin."""
    families, owners = anyio.run(_collect)
    tables: dict[str, Table] = defaultdict(lambda: Table("metric", "type", "labels", ""))
    for family in sorted(families, key=_name):
        name = _name(family)
        owner = "the process" if name.startswith("process_") else _plugin(owners.get(name, "slime_metrics"))
        labels = ", ".join(map(code, getattr(family, "_labelnames", ())))
        tables[owner].add(code(name), family.type, labels, f"{text(family.documentation)}.")
    sections = [f"## {owner}\n\n{_about(owner)}{table}" for owner, table in sorted(tables.items())]
    return _INTRODUCTION + "\n".join(sections)


async def _collect() -> tuple[list[Metric], dict[str, str]]:
    """Return the metrics of a running router; and, by the name of a metric, the module that added it."""
    router, _ = build(_ALL)
    async with router.running():  # plugins add some of their metrics at the start
        metrics: Any = router.components.get("metrics")
        return metrics.collect(), {
            name: offered.read.__module__ for name, offered in metrics._offered.items()
        }


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _plugin(module: str) -> str:
    return module.partition(".")[0].removeprefix("slime_")


def _about(owner: str) -> str:
    return "" if owner == "the process" else f"[The page of the plugin](../plugins/{owner}.md).\n\n"
