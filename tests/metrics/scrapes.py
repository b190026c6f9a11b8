"""Scrapes of a router, read as a Prometheus server reads them."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["EVERYTHING", "Numbers", "names_of", "scraped"]

#: The command line of a router with all plugins that have metrics.
EVERYTHING = (
    "--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache", "--plugin", "r3",
    "--plugin", "tiered_store", "--max-concurrent-requests", "4",
)  # fmt: skip

#: Samples by name and labels, the latter as in ``path=/generate status=200``.
Numbers = dict[tuple[str, str], float]


async def scraped(client: httpx.AsyncClient, url: str = "/metrics") -> Numbers:
    """Return the numbers of now."""
    answer = await client.get(url)
    assert answer.status_code == 200, answer.text
    return {
        (
            sample.name,
            " ".join(f"{name}={value}" for name, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def names_of(text: str) -> dict[str, str]:
    """Return the types of all metrics in ``text`` by name, those without samples too."""
    lines: Iterable[list[str]] = (line.split() for line in text.splitlines() if line.startswith("# TYPE "))
    return {name: kind for _, _, name, kind in lines}
