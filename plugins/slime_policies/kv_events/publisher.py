"""Publisher of KV events that an engine names in its answer to ``/server_info``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime_sglang.documents import document_in

__all__ = ["Publisher", "publisher_of"]

_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_HOST, _PORT = re.compile(r"[\w.:-]+", re.ASCII), re.compile(r"\d{1,5}", re.ASCII)
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Publisher:
    """Addresses ``tcp://HOST:PORT`` of one rank. ``replay``: None if the engine does not replay batches.

    ``ranks``: data-parallel ranks of the engine, each with a publisher of its own.
    """

    endpoint: str
    replay: str | None
    topic: bytes
    ranks: int


def publisher_of(server_info: bytes, url: str, rank: int) -> Publisher | None:
    """Return the publisher of ``rank`` of the worker at ``url``; None if ``server_info`` names no usable address.

    A wildcard address is reached at the worker's own host. SGLang names the address for replays only in the setting
    ``kv_events_config``, which is a part of ``server_info``.
    """
    document = document_in(server_info) or {}
    told = document.get("kv_events")
    if not isinstance(told, dict) or told.get("publisher") != "zmq":
        return None
    topic, ranks = told.get("topic", ""), told.get("dp_size", 1)
    endpoint = _address(told.get("endpoint_host"), told.get("endpoint_port_base"), url, rank)
    if endpoint is None or not isinstance(topic, str) or type(ranks) is not int:
        return None
    config = document.get("kv_events_config")
    setting = (document_in(config.encode()) if isinstance(config, str) else None) or {}
    return Publisher(
        endpoint, _replay_address(setting.get("replay_endpoint"), url, rank), topic.encode(), ranks
    )


def _replay_address(endpoint: Any, url: str, rank: int) -> str | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return _address(host, int(port) if _PORT.fullmatch(port) else None, url, rank)


def _address(host: Any, port: Any, url: str, rank: int) -> str | None:
    if not isinstance(host, str) or type(port) is not int or not 0 < port <= _MAX_PORT - rank:
        return None
    if host in _WILDCARDS:
        host = urlsplit(url).hostname or ""
    host = host.strip("[]")
    if not _HOST.fullmatch(host):  # in ZeroMQ's addresses, other characters may have a meaning
        return None
    return f"tcp://[{host}]:{port + rank}" if ":" in host else f"tcp://{host}:{port + rank}"
