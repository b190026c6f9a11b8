"""Scrapes: the answers of a router's routes at one time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["RefusedKey", "RouterClient", "Samples", "Scrape", "Unreachable"]

_TIMEOUT_S = 5.0
#: For ``GET /engine_metrics`` the router asks all engines, and waits for slow ones. The whole frame waits for this
#: answer, so its timeout is shorter than the others.
_ENGINES_TIMEOUT_S = 1.5
_ENGINES_AGAIN_S = 60.0


class Unreachable(Exception):
    """The router did not answer, answered with an error, or is no slime-router."""


class RefusedKey(Exception):
    """The router refused the key."""


class Samples:
    """The samples of a text in Prometheus' format."""

    def __init__(self, text: str = "") -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def of(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield labels and value of each sample of ``name`` with these ``labels``."""
        wanted = labels.items()
        return (found for found in self._samples.get(name, ()) if wanted <= found[0].items())

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples; None if there are none."""
        values = [value for _, value in self.of(name, **labels)]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> Counter[str]:
        """Return the sums of the samples of ``name`` by the value of ``label``."""
        found: Counter[str] = Counter()
        for labels, value in self.of(name):
            found[labels.get(label, "")] += value  # type: ignore[assignment]  # values are floats
        return found


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading. ``at``: seconds, monotonic. ``workers``: the list in ``GET /workers``.

    ``metrics`` is empty if the router has no metrics. ``engines`` is empty if no engine's metrics could be read.
    """

    at: float
    workers: list[dict[str, Any]]
    weight_version: str | None = None
    metrics: Samples = field(default_factory=Samples)
    engines: Samples = field(default_factory=Samples)


class RouterClient:
    """Reads the router at ``url`` with ``key``. A context manager."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=_TIMEOUT_S)
        self._ask_engines_at = 0.0

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def scrape(self) -> Scrape:
        """Return what the router says now. Raises Unreachable, RefusedKey."""
        try:
            workers = self._get("/workers").json()["workers"]
            version = self._get("/weight_version").json()["weight_version"]
            metrics = self._optional("/metrics", _TIMEOUT_S)
            engines = self._engines() if any(worker["is_healthy"] for worker in workers) else Samples()
        except httpx.HTTPError as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"its answers are not those of a slime-router ({error!r})") from error
        return Scrape(time.monotonic(), workers, version, metrics, engines)

    def _get(self, path: str) -> httpx.Response:
        answer = self._http.get(path)
        if answer.status_code in (401, 403):
            raise RefusedKey(_message(answer))
        if not answer.is_success:
            raise Unreachable(f"GET {path}: {answer.status_code} {_message(answer)}")
        return answer

    def _engines(self) -> Samples:
        """Return the engines' metrics. After a failure, return none for a minute: the router logs each failure."""
        if time.monotonic() < self._ask_engines_at:
            return Samples()
        found = self._optional("/engine_metrics", _ENGINES_TIMEOUT_S)
        if not found:
            self._ask_engines_at = time.monotonic() + _ENGINES_AGAIN_S
        return found

    def _optional(self, path: str, timeout_s: float) -> Samples:
        try:
            answer = self._http.get(path, timeout=timeout_s)
        except httpx.TimeoutException:
            return Samples()
        try:
            return Samples(answer.text) if answer.is_success else Samples()
        except ValueError:  # without the plugins metrics and control, a worker may answer in any form
            return Samples()


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        is_page = "html" in answer.headers.get("content-type", "")
        return answer.reason_phrase if is_page else " ".join(answer.text.split())[:200]
