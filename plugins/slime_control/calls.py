"""The engines' control endpoints, and what each of them means to a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CALLS", "Call"]

#: Whether a worker that failed a call is kept from new requests, while others did it: never, when it was in use, or
#: always (``weights``: whatever it serves now, it is not what the fleet serves).
Aside = Literal["no", "in_use", "weights"]


@dataclass(frozen=True, slots=True)
class Call:
    """One endpoint. ``confirmed``: only ``{"success": true}`` in the answer counts; else a 2xx is enough.

    A worker that fails it while others do it ``misses`` a call of that kind; one that does it ``clears`` earlier misses
    of these kinds. ``partial``: it may be a piece of an update, and clears nothing alone. ``prepares``: what the next
    update loads; without it that update succeeds with old weights, and so clears nothing.
    """

    path: str
    aside: Aside = "no"
    confirmed: bool = False
    get: bool = False
    misses: str | None = None
    clears: frozenset[str] = frozenset()
    partial: bool = False
    prepares: bool = False

    @property
    def names_version(self) -> bool:
        """Whether workers have another version after it."""
        return self.path.startswith("/update_")

    @property
    def moves_weights(self) -> bool:
        """Whether it changes weights, or is about to."""
        return self.aside == "weights" or self.prepares or self.path.endswith("_weights_update_group")

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "POST") if self.get else ("POST",)


#: By path. GET where SGLang has it as well.
CALLS = {
    call.path: call
    for call in (
        Call("/pause_generation", aside="in_use", misses="pause", clears=frozenset(("pause",))),
        Call(
            "/continue_generation", aside="in_use", misses="continue", clears=frozenset(("pause", "continue"))
        ),
        Call("/abort_request"),
        Call("/flush_cache", get=True),
        *(
            Call(
                f"/update_weights_from_{source}",
                aside="weights",
                confirmed=True,
                misses="weights",
                clears=frozenset(("weights",)) if source == "disk" else frozenset(),
                partial=source != "disk",
            )
            for source in ("disk", "tensor", "distributed", "ipc")
        ),
        *(
            Call(path, aside="weights", confirmed=True, misses="weights", partial=True)
            for path in ("/begin_weight_update", "/end_weight_update", "/post_process_weights")
        ),
        Call(
            "/pull_weights",
            aside="in_use",
            confirmed=True,
            misses="pull",
            clears=frozenset(("pull",)),
            prepares=True,
        ),
        Call("/update_weight_version", aside="weights", confirmed=True, misses="weights"),
        Call("/release_memory_occupation", aside="in_use", get=True, misses="memory"),
        Call(
            "/resume_memory_occupation",
            aside="in_use",
            get=True,
            misses="memory",
            clears=frozenset(("memory",)),
        ),
        Call("/init_weights_update_group", confirmed=True),
        Call("/destroy_weights_update_group", confirmed=True),
        *(
            Call(path, confirmed=True)
            for path in (
                "/load_lora_adapter",
                "/load_lora_adapter_from_tensors",
                "/load_lora_adapter_from_distributed",
                "/unload_lora_adapter",
            )
        ),
        Call("/start_profile", get=True),
        Call("/stop_profile", get=True),
    )
}
