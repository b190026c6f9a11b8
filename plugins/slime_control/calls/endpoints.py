"""The engines' control endpoints, and what each of them means to a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CALLS", "Call"]

#: Workers that are kept from new requests when they failed a call that others did: none, those that were in use, or all
#: (``weights``: whatever it serves now, it is not what the fleet serves).
Aside = Literal["no", "in_use", "weights"]


#: Part in an update in pieces: ``begin`` announces weights; ``last`` and ``name`` belong to the weights before them.
PieceKind = Literal["begin", "weights", "last", "name"]


@dataclass(frozen=True, slots=True)
class Call:
    """One endpoint. ``confirmed``: only ``{"success": true}`` in the answer counts; else a 2xx is enough.

    A worker that fails it while others do it ``misses`` a call of that kind; one that does it ``clears`` earlier misses
    of these kinds. ``piece``: it may be one of an update, and clears nothing alone. ``prepares``: what the next update
    loads; without it that update succeeds with old weights, and so clears nothing.
    """

    path: str
    aside: Aside = "no"
    confirmed: bool = False
    get: bool = False
    misses: str | None = None
    clears: tuple[str, ...] = ()
    piece: PieceKind | None = None
    prepares: bool = False

    @property
    def names_version(self) -> bool:
        """True when workers have another version after the call."""
        return self.path.startswith("/update_")

    @property
    def moves_weights(self) -> bool:
        """True when the call changes weights, or is about to."""
        return self.aside == "weights" or self.prepares or self.path.endswith("_weights_update_group")

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "POST") if self.get else ("POST",)


def _weights(path: str, piece: PieceKind | None, *clears: str) -> Call:
    return Call(path, aside="weights", confirmed=True, misses="weights", clears=clears, piece=piece)


#: By path. GET where SGLang has it as well. ``/post_process_weights`` may also begin an update.
CALLS = {
    call.path: call
    for call in (
        Call("/pause_generation", aside="in_use", misses="pause", clears=("pause",)),
        Call("/continue_generation", aside="in_use", misses="continue", clears=("pause", "continue")),
        Call("/abort_request"),
        Call("/flush_cache", get=True),
        _weights("/update_weights_from_disk", None, "weights"),
        *(
            _weights(f"/update_weights_from_{source}", "weights")
            for source in ("tensor", "distributed", "ipc")
        ),
        _weights("/begin_weight_update", "begin"),
        _weights("/end_weight_update", "last"),
        _weights("/post_process_weights", "last"),
        _weights("/update_weight_version", "name"),
        Call("/pull_weights", aside="in_use", confirmed=True, misses="pull", clears=("pull",), prepares=True),
        Call("/release_memory_occupation", aside="in_use", get=True, misses="memory"),
        Call("/resume_memory_occupation", aside="in_use", get=True, misses="memory", clears=("memory",)),
        Call("/init_weights_update_group", confirmed=True),
        Call("/destroy_weights_update_group", confirmed=True),
        Call("/load_lora_adapter", confirmed=True),
        Call("/load_lora_adapter_from_tensors", confirmed=True),
        Call("/load_lora_adapter_from_distributed", confirmed=True),
        Call("/unload_lora_adapter", confirmed=True),
        Call("/start_profile", get=True),
        Call("/stop_profile", get=True),
    )
}
