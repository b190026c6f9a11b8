"""KV events: the changes of an engine's KV cache, and the settings of the publisher that sends them.

Names and defaults are those of SGLang 0.5.23 (``srt/disaggregation/kv_events.py``). SGLang has further fields: ``bind``
and ``format`` of the settings, and optional fields of ``BlockStored``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import orjson

__all__ = ["CacheEvents", "Event", "KVEventsConfig"]

#: One event as it is published: a map with the field ``type``.
Event = dict[str, Any]

_ENDPOINT = re.compile(r"tcp://(\*|[\w.-]+|\[[\w:.]+\]):(\d{1,5})")
_MAX_PORT = 65535


class CacheEvents:
    """Changes of one KV cache that are not published yet, the oldest first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """Return the changes, and forget them."""
        taken, self._events = self._events, []
        return taken

    def stored(self, hashes: Sequence[int], parent: int | None, token_ids: Sequence[int]) -> None:
        """Note consecutive new blocks. ``parent``: the hash of the block before them, or None without such a block."""
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [*hashes],
                "parent_block_hash": parent,
                "token_ids": [*token_ids],
                "block_size": self._block_size,
                "lora_id": None,
                "medium": "GPU",
            }
        )

    def removed(self, hashes: Sequence[int]) -> None:
        """Note evicted blocks."""
        self._events.append({"type": "BlockRemoved", "block_hashes": [*hashes], "medium": "GPU"})

    def cleared(self) -> None:
        """Note that no block is left."""
        self._events.append({"type": "AllBlocksCleared"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """SGLang's ``--kv-events-config``. Raises ValueError if it is invalid.

    Rank ``n`` publishes at the port of ``endpoint`` plus ``n``, and replays at the port of ``replay_endpoint`` plus
    ``n``. ``buffer_steps``: the largest number of batches that can be replayed. ``hwm``: the largest number of batches
    that wait for a slow subscriber (0: no limit); later batches are dropped. ``max_queue_size`` has no effect: batches
    are sent at once.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher not in ("null", "zmq"):
            raise ValueError(f"publisher must be null or zmq, got {self.publisher!r}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
            if value is None and name == "replay_endpoint":
                continue
            if found is None or not 0 < int(found[2]) <= _MAX_PORT:
                raise ValueError(f"{name} must be an address such as tcp://*:5557, got {value!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
        if not isinstance(self.topic, str):
            raise ValueError(f"topic must be a string, got {self.topic!r}")

    @classmethod
    def of(cls, text: str) -> KVEventsConfig:
        """Parse the config from a JSON object. Raises ValueError, also when the library zmq is needed but missing."""
        try:
            config = cls(**orjson.loads(text))
        except orjson.JSONDecodeError:
            raise ValueError(f"wanted a JSON object, got {text!r}") from None
        except TypeError:  # not an object, or with an unknown key
            raise ValueError(
                f"wanted a JSON object with keys of {', '.join(cls.__slots__)}; got {text!r}"
            ) from None
        if config.publisher == "zmq" and find_spec("zmq") is None:
            raise ValueError("publisher zmq needs pyzmq: pip install 'slime-router[kv-events]'")
        return config

    def as_json(self) -> str:
        """Return the JSON object that :meth:`of` reads."""
        return orjson.dumps(asdict(self)).decode()

    def shifted(self, ports: int) -> KVEventsConfig:
        """Return the config with all ports higher by ``ports``. Raises ValueError if a port is above 65535."""
        replay = None if self.replay_endpoint is None else _shifted(self.replay_endpoint, ports)
        return replace(self, endpoint=_shifted(self.endpoint, ports), replay_endpoint=replay)

    def described(self, block_size: int, dp_size: int) -> dict[str, Any] | None:
        """Return the field ``kv_events`` of ``/server_info``; None without a publisher."""
        if self.publisher == "null":
            return None
        found = _ENDPOINT.fullmatch(self.endpoint)
        assert found is not None  # narrowing: __post_init__ has checked it
        return {
            "publisher": self.publisher,
            "endpoint_host": found[1],
            "endpoint_port_base": int(found[2]),
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": dp_size,
        }


def _shifted(endpoint: str, ports: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + ports}"
