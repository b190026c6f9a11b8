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
from slime_sglang.facts import BOOTSTRAP_PORT, MODEL_ID, WORKER_TYPES, bootstrap_port, registered_model

__all__ = ["Foreign", "SavedWorker", "Snapshot"]

_FORMAT = "slime-router state 1"


class Foreign(Exception):
    """The file is not a state that this version of the router can read; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class SavedWorker:
    """A worker, without its load and its circuit breaker, which end with the process. See Worker.

    ``torn``: the worker had a hold of ``control``, since it failed a control call.
    """

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
        """Save ``worker`` as it is now, without the model that it reported: it will report its model again."""
        own: dict[str, Any] = {"torn": "control" in worker.holds}
        own |= {"bootstrap_port": bootstrap_port(worker), "model_id": registered_model(worker)}
        return cls(**own, **{name: getattr(worker, name) for name in _WORKER_FIELDS if name not in own})

    @classmethod
    def from_document(cls, document: Any) -> SavedWorker:
        """Check one worker of the JSON. Raises Foreign."""
        if not isinstance(document, dict) or set(document) != set(_WORKER_FIELDS):
            raise Foreign(f"the fields of a worker are not {', '.join(_WORKER_FIELDS)}")
        saved = cls(**document)
        optional = (saved.model_id, saved.api_key, saved.weight_version, saved.reason)
        labels = saved.labels if isinstance(saved.labels, dict) else {"": None}
        well = (
            isinstance(saved.id, str)
            and saved.worker_type in WORKER_TYPES
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
            raise Foreign(f"a field of the worker {str(document.get('url'))[:200]!r} has an invalid value")
        return saved

    @property
    def facts(self) -> dict[str, Any]:
        """See :attr:`Worker.facts`."""
        return {BOOTSTRAP_PORT: self.bootstrap_port, MODEL_ID: self.model_id}

    def restored(self) -> Worker:
        """Return a worker that can be added to the pool."""
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
    """Workers in the order of registration, weight versions from old to new, and the fleet's current version."""

    workers: tuple[SavedWorker, ...] = ()
    versions: tuple[str, ...] = ()
    current: str | None = None

    @classmethod
    def of(cls, workers: Iterable[Worker], weights: WeightVersions) -> Snapshot:
        """Return a snapshot of the present state."""
        return cls(tuple(map(SavedWorker.of, workers)), weights.ordered, weights.current)

    def to_json(self) -> bytes:
        """Return the snapshot as JSON."""
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
            raise Foreign(f"not JSON: {error}") from None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise Foreign(f"not {_FORMAT!r}")
        workers, versions = document.get("workers"), document.get("weight_versions")
        current = document.get("weight_version")
        if not isinstance(workers, list) or not isinstance(versions, list):
            raise Foreign("workers or weight_versions is not a list")
        if not all(isinstance(version, str) for version in versions) or current not in (None, *versions):
            raise Foreign("a weight version is not a string, or weight_version is not among weight_versions")
        return cls(
            tuple(map(SavedWorker.from_document, workers)), tuple(versions), cast("str | None", current)
        )
