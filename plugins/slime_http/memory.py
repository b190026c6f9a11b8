"""Settings of the process's memory: the garbage collector, and the C library's heap."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["return_large_blocks", "tune_gc"]

#: Parameters of mallopt, from <malloc.h>, and a size in bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK = 1 << 20


def tune_gc() -> None:
    """Collect garbage less often than Python's default, and leave out the objects that exist now."""
    # A request leaves hardly any cycles. Yet at the default threshold of 700 objects, the collector took a fifth of the
    # time of a proxied request. Imported objects live as long as the process: do not walk them.
    gc.collect()
    gc.freeze()
    # The youngest generation is collected so often that a pause stays within milliseconds, the oldest hardly ever.
    gc.set_threshold(5_000, 5, 10_000)


def return_large_blocks() -> None:
    """Let large blocks of memory grow without a copy, and go back to the system when they are freed.

    glibc maps each block above a threshold separately (mmap). By default glibc raises the threshold when such a block
    is freed, so that later blocks of up to 32 MiB come from the heap (mallopt(3)). Setting the threshold stops this.
    Other C libraries have no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BLOCK)
