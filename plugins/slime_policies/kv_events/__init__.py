"""KV events: the blocks that engines say they have in their caches, for the policy ``cache_aware``.

``batches`` reads what engines publish, ``blocks`` keeps it, ``stream`` follows the numbers of the batches. None of
these does I/O. ``subscription`` and ``subscriptions`` do; they need zmq, which is an extra.
"""

from __future__ import annotations

from slime_policies.kv_events.blocks import Blocks, WorkerBlocks

__all__ = ["Blocks", "WorkerBlocks"]
