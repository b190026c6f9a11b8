"""KV events: the blocks that engines say they have in their caches, for the policies ``auto`` and ``cache_aware``.

``batches`` parses events, ``blocks`` keeps the blocks, ``stream`` follows the numbers of batches; these modules have no
I/O. ``subscription`` and ``subscriptions`` do I/O, and need zmq, which is an extra.
"""

from __future__ import annotations

from slime_policies.kv_events.blocks import Blocks, WorkerBlocks

__all__ = ["Blocks", "WorkerBlocks"]
