"""Facts about an SGLang worker: its type, rank, model, shape of the routed experts, and bootstrap port."""

from __future__ import annotations

from typing import Any

from router_core import Worker

__all__ = [
    "BOOTSTRAP_PORT",
    "EXPERTS_SHAPE",
    "MODEL_ID",
    "RANK",
    "TOLD_MODEL",
    "WORKER_TYPES",
    "bootstrap_port",
    "described",
    "dp_rank",
    "experts_shape",
    "model_id",
    "registered_model",
]

#: Names in :attr:`Worker.facts`. ``TOLD_MODEL``: the model that the worker names. ``MODEL_ID``: the model that its
#: registration names. ``EXPERTS_SHAPE``: layers, and experts per token.
BOOTSTRAP_PORT, MODEL_ID, TOLD_MODEL = "bootstrap_port", "model_id", "told_model"
EXPERTS_SHAPE = "experts_shape"
#: A name in the facts of a worker's target: the number of the data-parallel rank that the target stands for.
RANK = "dp_rank"
#: The values of :attr:`Worker.worker_type`.
WORKER_TYPES = ("regular", "prefill", "decode", "passthrough")


def bootstrap_port(worker: Worker) -> int | None:
    """Return the port at which decode workers reach the prefill worker ``worker``; None: the engine's default."""
    port: int | None = worker.server.facts.get(BOOTSTRAP_PORT)
    return port


def dp_rank(worker: Worker) -> int | None:
    """Return the number of the data-parallel rank that ``worker`` stands for; None for a whole server."""
    rank: int | None = worker.facts.get(RANK)
    return rank


def experts_shape(worker: Worker) -> tuple[int, int] | None:
    """Return the numbers of layers and of experts per token of the worker's model; None if it does not report them."""
    shape: tuple[int, int] | None = worker.server.facts.get(EXPERTS_SHAPE)
    return shape


def registered_model(worker: Worker) -> str | None:
    """Return the model that the registration of ``worker`` names, or None."""
    model: str | None = worker.server.facts.get(MODEL_ID)
    return model


def model_id(worker: Worker) -> str | None:
    """Return the model of ``worker`` by its registration, else the model that the worker names; None: unknown."""
    told: str | None = worker.server.facts.get(TOLD_MODEL)
    registered = registered_model(worker)
    return told if registered is None else registered


def described(worker: Worker) -> dict[str, Any]:
    """Return ``worker`` as ``GET /workers`` shows it."""
    server = worker.server
    return {
        "id": worker.id,
        "url": worker.name,
        "worker_type": server.worker_type,
        "is_healthy": server.is_healthy,
        "state": server.state,
        "reason": server.reason,
        "holds": {owner: hold.reason for owner, hold in server.holds.items()},
        "load": worker.load,
        "weight_version": server.weight_version,
        "model_id": model_id(server),
        "bootstrap_port": bootstrap_port(server),
        "labels": server.labels,
    }
