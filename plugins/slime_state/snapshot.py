"""The saved state of a router, as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

import orjson

from router_core import Worker
from router_core.errors import BadRequest
from router_core.weights import WeightVersions
from router_core.workers import WorkerState, WorkerType, worker_url
from slime_sglang.facts import BOOTSTRAP_PORT, MODEL_ID, bootstrap_port, registered_model

__all__ = ["Foreign", "SavedWorker", "Snapshot"]

_FORMAT = "slime-router state 1"


class Foreign(Exception):
    """Something that no router wrote; the message says what."""


@dataclass(frozen=True, slots=True)
class SavedWorker:
    """A worker, but for what ends with the process: its load and its circuit breaker. See Worker."""

    id: str
    url: str
    worker_type: WorkerType
    bootstrap_port: int | None
    model_id: str | None
    labels: dict[str, str]
    api_key: str | None
    weight_version: str | None
    state: WorkerState
    reason: str | None
    torn: bool

    @classmethod
    def of(cls, worker: Worker) -> SavedWorker:
        """``worker`` as it is now. The name of a model that it told is not kept: it will tell it again."""
        own: dict[str, Any] = {"torn": "control" in worker.holds}
        own |= {"bootstrap_port": bootstrap_port(worker), "model_id": registered_model(worker)}
        return cls(**own, **{name: getattr(worker, name) for name in _WORKER_FIELDS if name not in own})

    @classmethod
    def from_document(cls, document: Any) -> SavedWorker:
        """Raises Foreign."""
        if not isinstance(document, dict) or set(document) != set(_WORKER_FIELDS):
            raise Foreign(f"a worker without {', '.join(_WORKER_FIELDS)}, or with more")
        saved = cls(**document)
        optional = (saved.model_id, saved.api_key, saved.weight_version, saved.reason)
        labels = saved.labels if isinstance(saved.labels, dict) else {"": None}
        well = (
            isinstance(saved.id, str)
            and saved.worker_type in get_args(WorkerType)
            and saved.state in get_args(WorkerState)
            and isinstance(saved.bootstrap_port, int | None)
            and all(isinstance(value, str | None) for value in optional)
            and all(isinstance(value, str) for value in labels.values())
            and isinstance(saved.torn, bool)
        )
        try:
            well = well and worker_url(saved.url) == saved.url
        except (BadRequest, TypeError, AttributeError):
            well = False
        if not well:
            raise Foreign(f"no worker of a router: {str(document.get('url'))[:200]!r}")
        return saved

    @property
    def facts(self) -> dict[str, Any]:
        """See :attr:`Worker.facts`."""
        return {BOOTSTRAP_PORT: self.bootstrap_port, MODEL_ID: self.model_id}

    def restored(self) -> Worker:
        """The worker, about to join again."""
        return Worker(
            self.url,
            self.worker_type,
            self.facts,
            dict(self.labels),
            self.weight_version,
            self.api_key,
            id=self.id,
        )


_WORKER_FIELDS = tuple(field.name for field in fields(SavedWorker))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Workers, in the order of their registration; the versions of the weights, oldest first; the fleet's own."""

    workers: tuple[SavedWorker, ...] = ()
    versions: tuple[str, ...] = ()
    current: str | None = None

    @classmethod
    def of(cls, workers: Iterable[Worker], weights: WeightVersions) -> Snapshot:
        """Return a snapshot of the present state."""
        return cls(tuple(map(SavedWorker.of, workers)), weights.ordered, weights.current)

    def to_json(self) -> bytes:
        """See :meth:`from_json`."""
        document = {
            "format": _FORMAT,
            "weight_version": self.current,
            "weight_versions": self.versions,
            "workers": self.workers,
        }
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, content: bytes) -> Snapshot:
        """Read the JSON that :meth:`to_json` wrote. Raises Foreign."""
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise Foreign(f"no JSON: {error}") from None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise Foreign(f"not {_FORMAT!r}")
        workers, versions = document.get("workers"), document.get("weight_versions")
        current = document.get("weight_version")
        if not isinstance(workers, list) or not isinstance(versions, list):
            raise Foreign("no lists of workers and versions")
        if not all(isinstance(version, str) for version in versions) or current not in (None, *versions):
            raise Foreign("versions that are no names, or not the fleet's")
        return cls(
            tuple(map(SavedWorker.from_document, workers)), tuple(versions), cast("str | None", current)
        )
