"""Rows of items: a few in a tuple, many in a dict."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

__all__ = ["MANY", "Row", "with_item", "without_item"]

_T = TypeVar("_T")
#: Items in a row: a few in a tuple, many in a dict, which grows and shrinks without a copy.
Row: TypeAlias = "tuple[_T, ...] | dict[_T, None]"
#: So many are looked through, and copied for each one that comes.
MANY = 64


def with_item(items: Row[_T], item: _T) -> Row[_T]:
    """``items`` and ``item``, the newest of them."""
    if isinstance(items, dict):
        items[item] = None
        return items
    return (*items, item) if len(items) < MANY else dict.fromkeys((*items, item))


def without_item(items: Row[_T], item: _T) -> Row[_T]:
    """``items`` without ``item``, which is one of them."""
    if isinstance(items, dict):
        del items[item]
        return items
    slot = items.index(item)
    return items[:slot] + items[slot + 1 :]
