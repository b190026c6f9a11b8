"""The engines' control endpoints, and what each of them means to a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CALLS", "Call"]

#: Role of a call in an update in pieces, which is an update that takes several calls. A ``begin`` announces weights, a
#: ``weights`` brings some of them. A ``last`` or a ``name`` follows the weights that it belongs to; a ``name`` names
#: the version of these weights.
PieceKind = Literal["begin", "weights", "last", "name"]


@dataclass(frozen=True, slots=True)
class Call:
    """One endpoint. A 2xx without ``{"success": false}`` is a success.

    ``confirmed``: the answer must also have ``"success": true``.
    ``is_update``: the call changes weights, or is a piece of an update.
    ``get``: GET is allowed, too.
    ``misses``: the kind of missed call that is noted for a worker which fails the call while other workers take it.
    ``clears``: the kinds of missed calls that the call makes up for.
    ``piece``: the call's role in an update in pieces. A single piece makes up for no missed call.
    ``prepares``: the call fetches the files of the next update; a worker that missed it would load old files.
    """

    path: str
    is_update: bool = False
    confirmed: bool = False
    get: bool = False
    misses: str | None = None
    clears: tuple[str, ...] = ()
    piece: PieceKind | None = None
    prepares: bool = False

    @property
    def names_version(self) -> bool:
        """True when the body may name the version that the workers have after the call."""
        return self.path.startswith("/update_")

    @property
    def moves_weights(self) -> bool:
        """True when the call changes weights, or prepares or ends such a change."""
        return self.is_update or self.prepares or self.path.endswith("_weights_update_group")

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "POST") if self.get else ("POST",)


def _weights(path: str, piece: PieceKind | None, *clears: str) -> Call:
    return Call(path, is_update=True, confirmed=True, misses="weights", clears=clears, piece=piece)


#: Calls by path. GET is allowed where SGLang allows it. ``/post_process_weights`` may also begin an update.
CALLS = {
    call.path: call
    for call in (
        Call("/pause_generation", misses="pause", clears=("pause",)),
        Call("/continue_generation", misses="continue", clears=("pause", "continue")),
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
        Call("/pull_weights", confirmed=True, misses="pull", clears=("pull",), prepares=True),
        Call("/release_memory_occupation", get=True, misses="memory"),
        Call("/resume_memory_occupation", get=True, misses="memory", clears=("memory",)),
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
