"""Rows: ordered sets of items, compact for few items and fast for many."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

__all__ = ["MANY", "Row", "with_item", "without_item"]

_T = TypeVar("_T")
#: Items in a row: a few in a tuple, many in a dict, which grows and shrinks without a copy.
Row: TypeAlias = "tuple[_T, ...] | dict[_T, None]"
#: Maximum length of a tuple, which is searched item by item and copied for each new item.
MANY = 64


def with_item(items: Row[_T], item: _T) -> Row[_T]:
    """Return ``items`` with ``item`` added as the newest."""
    if isinstance(items, dict):
        items[item] = None
        return items
    return (*items, item) if len(items) < MANY else dict.fromkeys((*items, item))


def without_item(items: Row[_T], item: _T) -> Row[_T]:
    """Return ``items`` without ``item``, which is one of them."""
    if isinstance(items, dict):
        del items[item]
        return items
    slot = items.index(item)
    return items[:slot] + items[slot + 1 :]
