"""A pod, as the Kubernetes API describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["PORT_ANNOTATION", "Pod", "PodState"]

#: The name of the annotation that states the port of a prefill pod's bootstrap server.
PORT_ANNOTATION = "sglang.ai/bootstrap-port"

PodState = Literal["coming", "serving", "leaving", "ended"]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, as the API describes it. ``state`` is one of these:

    ============ =====================================================================
    ``coming``   starting, or not ready
    ``serving``  running, ready, with an address
    ``leaving``  terminating, in its grace period
    ``ended``    its containers have ended for good; another pod may get its address
    ============ =====================================================================
    """

    uid: str
    name: str
    labels: Mapping[str, str]
    address: str | None
    state: PodState
    bootstrap_port: str | None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Pod:
        """Parse a v1 Pod. Raises LookupError, TypeError or AttributeError for anything else."""
        metadata, status = document["metadata"], document.get("status") or {}
        uid, address = metadata["uid"], status.get("podIP")
        bootstrap_port = (metadata.get("annotations") or {}).get(PORT_ANNOTATION)
        for text in (uid, address or "", bootstrap_port or ""):
            if not isinstance(text, str):
                raise TypeError(f"wanted a string, got {type(text).__name__}")
        return cls(
            uid,
            f"{metadata.get('namespace')}/{metadata['name']}",
            dict(metadata.get("labels") or {}),
            address,
            _state(metadata, status),
            bootstrap_port,
        )

    def url(self, port: int) -> str:
        """Return the URL of the pod, which must have an address."""
        return (
            f"http://[{self.address}]:{port}"
            if ":" in (self.address or "")
            else f"http://{self.address}:{port}"
        )


def _state(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> PodState:
    phase = status.get("phase")
    if phase in ("Succeeded", "Failed"):
        return "ended"
    if metadata.get("deletionTimestamp"):
        return "leaving"
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    return "serving" if ready and phase == "Running" and status.get("podIP") else "coming"
