"""The metrics that plugins offer: their numbers are read when somebody scrapes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from router_core.errors import PluginError
from slime_metrics.contracts import Read

__all__ = ["MAX_SERIES", "Metrics"]

logger = logging.getLogger(__name__)

#: Largest number of series of a plugin's metric. Further series are summed, so endless label values fill no memory.
MAX_SERIES = 1000
_OTHER = "other"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class _Offered:
    """A metric, and the function that reads its numbers."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Read

    def family(self) -> Metric:
        """Return the metric with the numbers of now."""
        family = self.kind(self.name, self.help, labels=self.labels)
        found = self.read()
        if isinstance(found, Mapping):
            for values, number in _bounded(found, len(self.labels)):
                family.add_metric(values, number)
        elif found is not None:
            family.add_metric((), found)
        return family


def _bounded(
    found: Mapping[str, float] | Mapping[tuple[str, str], float], labels: int
) -> Iterable[tuple[Sequence[str], float]]:
    numbers = [((values,) if isinstance(values, str) else values, number) for values, number in found.items()]
    yield from numbers[:MAX_SERIES]
    if len(numbers) > MAX_SERIES:
        yield [_OTHER] * labels, sum(number for _, number in numbers[MAX_SERIES:])


class Metrics:
    """The component ``"metrics"``, see :class:`slime_metrics.contracts.Metrics`, and the text for a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._offered: dict[str, _Offered] = {}
        ProcessCollector(registry=self._registry)
        self._registry.register(_Plugins(self._offered))

    def gauge(self, name: str, help: str, read: Read, labels: Sequence[str] = ()) -> None:
        """See :class:`slime_metrics.contracts.Metrics`."""
        self._add(_Offered(GaugeMetricFamily, name, help, tuple(labels), read))

    def counter(self, name: str, help: str, read: Read, labels: Sequence[str] = ()) -> None:
        """See :class:`slime_metrics.contracts.Metrics`."""
        if not name.endswith("_total"):
            raise PluginError(f"metric {name!r}: the name of a counter ends in _total")
        self._add(_Offered(CounterMetricFamily, name, help, tuple(labels), read))

    def numbers(self, name: str) -> float | Mapping[str, float] | Mapping[tuple[str, str], float] | None:
        """See :class:`slime_metrics.contracts.Metrics`."""
        offered = self._offered.get(name)
        if offered is None:
            return None
        try:
            return offered.read()
        except Exception:
            logger.exception("the metric %s is left out", name)
            return None

    def _add(self, offered: _Offered) -> None:
        if not _NAME.fullmatch(offered.name):
            raise PluginError(
                f"metric {offered.name!r}: wanted lower-case letters, digits and underscores, the first a letter"
            )
        if offered.name in self._offered:
            raise PluginError(f"metric {offered.name!r} is registered twice")
        self._offered[offered.name] = offered

    def collector(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add metrics of this plugin, such as histograms."""
        self._registry.register(_Own(collect))

    def collect(self) -> list[Metric]:
        """Return all metrics with the numbers of now. Call this on the event loop."""
        return list(self._registry.collect())

    @staticmethod
    def written(families: Sequence[Metric], accept: str) -> tuple[bytes, str]:
        """Return the text of ``families``, and its media type. ``accept``: the header that asks for a format."""
        encode, media_type = choose_encoder(accept)
        return encode(_Collected(families)), media_type


class _Plugins(Collector):
    """The metrics of plugins. A metric whose ``read`` raises is left out, and the log has the traceback."""

    def __init__(self, offered: Mapping[str, _Offered]) -> None:
        self._offered = offered

    def collect(self) -> Iterable[Metric]:
        for each in self._offered.values():
            try:
                yield each.family()
            except Exception:
                logger.exception("the metric %s is left out", each.name)


class _Own(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
