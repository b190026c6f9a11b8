"""Rows: ordered sets of items, compact for few items and fast for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["MANY", "Items", "Row", "items_of", "row_of", "sorted_row", "with_item", "without_item"]

_T = TypeVar("_T")
#: Several items: a few in a tuple, many in a dict, which grows and shrinks without a copy.
Items: TypeAlias = "tuple[_T, ...] | dict[_T, None]"
#: A row. A single item, the most frequent case, is its own row: a tuple would take 48 bytes. None: no item.
Row: TypeAlias = "_T | Items[_T] | None"
#: Maximum length of a tuple, which is searched item by item and copied for each new item.
MANY = 64


def items_of(row: Row[_T]) -> Items[_T]:
    """Return the items of ``row``, newest last."""
    if isinstance(row, (tuple, dict)):
        return row
    return (row,) if row is not None else ()


def row_of(items: Sequence[_T]) -> Row[_T]:
    """Return a row of ``items``, newest last."""
    if len(items) > MANY:
        return dict.fromkeys(items)
    return tuple(items) if len(items) > 1 else items[0] if items else None


def with_item(row: Row[_T], item: _T) -> Row[_T]:
    """Return ``row`` with ``item`` added as the newest."""
    if row is None:
        return item
    if isinstance(row, dict):
        row[item] = None
        return row
    return row_of((*items_of(row), item))


def without_item(row: Row[_T], item: _T) -> Row[_T]:
    """Return ``row`` without ``item``, which is one of its items."""
    if isinstance(row, dict):
        del row[item]
        return row or None
    items = tuple(items_of(row))
    slot = items.index(item)
    return row_of(items[:slot] + items[slot + 1 :])


def sorted_row(row: Row[_T], place: Callable[[_T], int]) -> Row[_T]:
    """Return ``row`` in the order of ``place``."""
    if not isinstance(row, (tuple, dict)):
        return row
    return row_of(sorted(row, key=place))
