"""Batches of KV events, as SGLang and vLLM publish them: msgpack ``[time, events, rank]``.

In SGLang from 0.5.23 on, and in recent versions of vLLM, an event is a map with the key ``type``. In older versions of
both, an event is a list of the type and the fields in a fixed order. Sources: ``srt/disaggregation/kv_events.py`` of
SGLang and ``distributed/kv_events.py`` of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack  # type: ignore[import-untyped]  # it has no annotations

__all__ = ["Cleared", "Event", "Hash", "MalformedBatch", "Removed", "Stored", "read_batch"]

#: The engine's own name of a block: 64 bits in SGLang, bytes in some versions of vLLM.
Hash: TypeAlias = int | bytes

#: The fields that follow the type in an event that is a list. Some versions of SGLang have another field in the place
#: of ``lora_name``.
_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
#: The most blocks of a ``Stored``. Larger events are divided, so that other tasks get turns in between.
_BLOCKS_AT_ONCE = 1000


class MalformedBatch(ValueError):
    """The bytes are not a batch of KV events. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another. ``parent``: the block before the first, or None if the first begins a sequence.

    ``token_ids``: the ids of all blocks, ``block_size`` ids for each.
    """

    hashes: list[Hash]
    parent: Hash | None
    token_ids: list[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that the engine no longer has."""

    hashes: list[Hash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine has no blocks any more."""


Event: TypeAlias = Stored | Removed | Cleared


def read_batch(payload: bytes) -> list[Event]:
    """Return the events in ``payload``. Raises MalformedBatch.

    Events of unknown types, and of other media than the GPU, are left out. Also left out are blocks that a prompt's ids
    alone do not identify. These are blocks of a LoRA adapter, of a cache salt, or of another group of layers.
    """
    try:
        batch = msgpack.unpackb(payload)
    except Exception as error:  # each version of msgpack raises other errors
        raise MalformedBatch(f"it is not msgpack: {type(error).__name__}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise MalformedBatch("it is not a list of a time and a list of events")
    return [event for raw in batch[1] for event in _read(raw)]


def _read(raw: Any) -> Iterator[Event]:
    kind, fields = _fields_of(raw)
    if kind not in _FIELDS or fields.get("group_idx") or fields.get("medium") not in (None, "GPU"):
        return
    if kind == "AllBlocksCleared":
        yield Cleared()
        return
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not {*map(type, hashes)} <= {int, bytes}:
        raise MalformedBatch(f"block_hashes of {kind} is not a list of hashes")
    if kind == "BlockRemoved":
        yield Removed(hashes)
    elif not _depends_on_more_than_ids(fields):
        yield from _stored(hashes, fields)


def _fields_of(raw: Any) -> tuple[str, dict[Any, Any]]:
    kind: Any = None
    if isinstance(raw, dict):
        kind = raw.get("type")
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        if isinstance(kind, str):
            raw = dict(zip(_FIELDS.get(kind, ()), raw[1:], strict=False))
    if not isinstance(kind, str):
        raise MalformedBatch("an event has no type")
    return kind, raw


def _depends_on_more_than_ids(fields: dict[Any, Any]) -> bool:
    """Return True when the ids of the prompt alone do not identify the blocks."""
    name, keys = fields.get("lora_name"), fields.get("extra_keys")
    if isinstance(name, dict):  # SGLang of August 2026: metadata
        name = name.get("cache_salt")
    elif isinstance(name, list):  # SGLang of July 2026: parts of the model
        name = None
    has_keys = any(keys) if isinstance(keys, list) else bool(keys)
    return bool(name or has_keys or fields.get("cache_salt")) or fields.get("lora_id") is not None


def _stored(hashes: list[Hash], fields: dict[Any, Any]) -> Iterator[Stored]:
    parent, ids, size = (fields.get(name) for name in ("parent_block_hash", "token_ids", "block_size"))
    if type(size) is not int or size < 1:
        raise MalformedBatch(f"block_size is {size!r}"[:100])
    if parent is not None and type(parent) not in (int, bytes):
        raise MalformedBatch("parent_block_hash is not a hash")
    if not isinstance(ids, list) or len(ids) != size * len(hashes):
        raise MalformedBatch("token_ids has another length than the blocks")
    if (kinds := {*map(type, ids)}) == {list}:  # with EAGLE: pairs of a token and the next one
        ids = [pair[0] if pair else None for pair in ids]
        kinds = {*map(type, ids)}
    if not kinds <= {int}:
        raise MalformedBatch("token_ids has values that are not ids")
    for start in range(0, len(hashes), _BLOCKS_AT_ONCE):
        end = start + _BLOCKS_AT_ONCE
        before = hashes[start - 1] if start else parent
        yield Stored(hashes[start:end], before, ids[start * size : end * size], size)
