"""The parts of Jinja that a proof (see ``locality``) understands: they keep no state, and do not depend on chance."""

from __future__ import annotations

from jinja2 import nodes

__all__ = ["is_const", "is_member", "is_name", "is_plain"]

#: Jinja's names that keep a state, give a random result, or read values in a way that no proof analyses.
_IMPURE = frozenset(("attr", "cycler", "joiner", "lipsum", "namespace", "random", "self"))
#: Methods that change a list or an object.
_CHANGING = frozenset(
    (
        "add",
        "append",
        "clear",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    )
)
_STATEMENTS = (nodes.Assign, nodes.AssignBlock, nodes.For, nodes.If, nodes.Macro, nodes.Output)
_EXPRESSIONS = (nodes.Expr, nodes.Keyword, nodes.Operand, nodes.Pair)


def is_plain(node: nodes.Node) -> bool:
    """Return True for a node of a known kind that keeps no state and does not depend on chance."""
    if isinstance(node, nodes.Name | nodes.Filter):
        return node.name not in _IMPURE
    if isinstance(node, nodes.Call):
        called = node.node
        return isinstance(called, nodes.Name) or (
            isinstance(called, nodes.Getattr) and called.attr not in _CHANGING
        )
    return isinstance(node, _STATEMENTS + _EXPRESSIONS) and not isinstance(node, nodes.NSRef)


def is_name(node: nodes.Node | None, name: str) -> bool:
    """Return True if ``node`` is the variable ``name``."""
    return isinstance(node, nodes.Name) and node.name == name


def is_member(node: nodes.Node, name: str, member: str) -> bool:
    """Return True for ``name.member``."""
    return isinstance(node, nodes.Getattr) and node.attr == member and is_name(node.node, name)


def is_const(node: nodes.Node, value: int) -> bool:
    """Return True for the number ``value``, which may be negative."""
    if isinstance(node, nodes.Neg):
        return is_const(node.node, -value) and value < 0
    return isinstance(node, nodes.Const) and node.value == value
