"""Ordered sets of items, compact for few items and fast for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["MANY", "ItemSet", "Items", "item_set", "items_of", "sorted_set", "with_item", "without_item"]

_T = TypeVar("_T")
#: Several items: a few in a tuple, many in a dict, which grows and shrinks without a copy.
Items: TypeAlias = "tuple[_T, ...] | dict[_T, None]"
#: A set of items. A set of one item, the most frequent case, is the item itself, since a tuple would take 48 bytes. But
#: a dict that has lost its other items stays a dict. None is the empty set.
ItemSet: TypeAlias = "_T | Items[_T] | None"
#: Maximum length of a tuple, which is searched item by item and copied for each new item.
MANY = 64


def items_of(group: ItemSet[_T]) -> Items[_T]:
    """Return the items of the set ``group``, newest last."""
    if isinstance(group, (tuple, dict)):
        return group
    return (group,) if group is not None else ()


def item_set(items: Sequence[_T]) -> ItemSet[_T]:
    """Return a set of ``items``, newest last."""
    if len(items) > MANY:
        return dict.fromkeys(items)
    return tuple(items) if len(items) > 1 else items[0] if items else None


def with_item(group: ItemSet[_T], item: _T) -> ItemSet[_T]:
    """Return the set ``group`` with ``item`` added as the newest."""
    if group is None:
        return item
    if isinstance(group, dict):
        group[item] = None
        return group
    return item_set((*items_of(group), item))


def without_item(group: ItemSet[_T], item: _T) -> ItemSet[_T]:
    """Return the set ``group`` without ``item``, which is one of its items."""
    if isinstance(group, dict):
        del group[item]
        return group or None
    items = tuple(items_of(group))
    slot = items.index(item)
    return item_set(items[:slot] + items[slot + 1 :])


def sorted_set(group: ItemSet[_T], place: Callable[[_T], int]) -> ItemSet[_T]:
    """Return the set ``group`` in the order of ``place``."""
    if not isinstance(group, (tuple, dict)):
        return group
    return item_set(sorted(group, key=place))
