"""Searches with which a chat template begins, such as Qwen3's search for the last question of the user.

A search is a loop over all messages, before the loop that writes them. It keeps the index of a message in a namespace::

    {% set ns = namespace(last=-1) %}
    {% for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}

Later the template compares the index of each message with ``ns.last``, to show only the thoughts behind the question.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, UndefinedError, meta, nodes

from slime_openai.prompts.plain_nodes import is_member, is_name, is_plain
from slime_openai.requests.messages import Message

__all__ = ["UNKNOWN", "Member", "Search", "SearchNodes", "Searched", "take_searches"]

_MESSAGES, _LOOP = "messages", "loop"
#: Members of a message that a search may read.
_READ = ("role", "content")
#: Filters that a search may use. Other filters may be defined differently in the tokenizer's environment.
_FILTERS = ("count", "length")
#: Members of ``loop`` that a search may read.
_COUNTERS = frozenset(("first", "index", "index0", "last", "length", "revindex", "revindex0"))
_METHODS = frozenset(("endswith", "lower", "lstrip", "rstrip", "startswith", "strip", "upper"))
#: Any use of this value raises an error.
UNKNOWN = StrictUndefined(name="content")


def _is_string(value: object) -> bool:
    if value is UNKNOWN:
        raise UndefinedError("an unknown content")  # Jinja's own test would return False
    return isinstance(value, str)


#: The environment is no sandbox, since a sandbox would be slow. So searches may read only known attributes.
_ENVIRONMENT = Environment(autoescape=False)
_ENVIRONMENT.tests["string"] = _is_string


class Searched(NamedTuple):
    """A message as a search sees it. A search fails if it reads a content that is :data:`UNKNOWN`."""

    role: str
    content: str | StrictUndefined


class Member(NamedTuple):
    """The member ``name`` of the namespace ``space``."""

    space: str
    name: str


class SearchNodes(NamedTuple):
    """The statements of all searches of a template. ``spaces``: the names of their namespaces."""

    statements: list[nodes.Node]
    spaces: frozenset[str]

    def compared(self, node: nodes.Node) -> Member | None:
        """Return the member that ``node`` compares with ``loop.index0``; None if it is no such comparison."""
        if not isinstance(node, nodes.Compare) or len(node.ops) != 1 or node.ops[0].op in ("in", "notin"):
            return None
        left, right = node.expr, node.ops[0].expr
        if is_member(right, _LOOP, "index0"):
            left, right = right, left
        if is_member(left, _LOOP, "index0") and isinstance(right, nodes.Getattr):
            space = right.node
            if isinstance(space, nodes.Name) and space.name in self.spaces:
                return Member(space.name, right.attr)
        return None


class Search:
    """Runs only the searches of a template. Each of ``members`` holds a number that a search finds."""

    def __init__(self, searches: SearchNodes, members: Collection[Member]) -> None:
        parts: list[nodes.Node] = [*searches.statements]
        self._count = len(members)
        for member in members:
            found = nodes.Getattr(nodes.Name(member.space, "load"), member.name, "load")
            parts.append(nodes.Output([nodes.TemplateData(","), found]))
        self._template = _ENVIRONMENT.from_string(_template(parts))

    def found(self, messages: Sequence[Message | Searched]) -> list[int] | None:
        """Return the number of each member for ``messages``; None if a member is no number, or a search fails."""
        try:
            text = self._template.render(messages=messages)
            found = [int(each) for each in text.split(",")[1:]]
        except Exception:  # a template is a program, which may raise anything
            return None
        return found if len(found) == self._count else None


def take_searches(body: list[nodes.Node]) -> SearchNodes:
    """Remove the searches from ``body``, the statements of a whole template, and return them.

    A loop is no search if it has an output, changes more than members of a namespace, or reads more of messages than
    roles and contents. If the searches read other variables than ``messages``, none is removed.
    """
    spaces: dict[str, nodes.Node] = {}
    searches: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and _is_space(node.node):
            spaces[node.target.name] = node
        elif isinstance(node, nodes.For) and _is_search(node, spaces):
            searches.append(node)
        elif any(is_name(each.iter, _MESSAGES) for each in _loops(node)):
            break  # this loop writes the messages
    used = {each.name for node in searches for each in node.find_all(nodes.NSRef)}
    statements = [*(spaces[name] for name in sorted(used)), *searches]
    if not statements or meta.find_undeclared_variables(_template(statements)) != {_MESSAGES}:
        return SearchNodes([], frozenset())
    body[:] = [node for node in body if not any(node is each for each in statements)]
    return SearchNodes(statements, frozenset(used))


def _loops(node: nodes.Node) -> Iterator[nodes.For]:
    if isinstance(node, nodes.For):
        yield node
    yield from node.find_all(nodes.For)


def _template(statements: Sequence[nodes.Node]) -> nodes.Template:
    whole = nodes.Template([*statements], lineno=1)
    for node in whole.find_all(nodes.Node):
        node.set_lineno(1)
    whole.set_environment(_ENVIRONMENT)
    return whole


def _is_space(node: nodes.Node) -> bool:
    """Return True if ``node`` makes a namespace from plain values."""
    return (
        isinstance(node, nodes.Call)
        and is_name(node.node, "namespace")
        and not (node.args or node.dyn_args or node.dyn_kwargs)
        and all(_reads_little(each.value, "", ()) for each in node.kwargs)
    )


def _is_search(loop: nodes.For, spaces: Container[str]) -> bool:
    """Return True for a loop over all messages, in either direction, that only sets members of ``spaces``."""
    target, backwards = loop.target, nodes.Slice(None, None, nodes.Neg(nodes.Const(1)))
    is_over_messages = is_name(loop.iter, _MESSAGES) or (
        isinstance(loop.iter, nodes.Getitem)
        and is_name(loop.iter.node, _MESSAGES)
        and loop.iter.arg == backwards
    )
    return (
        is_over_messages
        and isinstance(target, nodes.Name)
        and not (loop.test or loop.else_ or loop.recursive)
        and any(loop.find_all(nodes.NSRef))
        and all(_reads_little(node, target.name, spaces) for node in loop.body)
    )


def _reads_little(node: nodes.Node, message: str, spaces: Container[str]) -> bool:
    """Return True if ``node`` has no output but white space, and reads of the messages only what a search may read.

    ``message`` is the name of the loop's variable. A search may read the number of messages, the counters of its loop,
    and the members ``_READ`` of ``message``.
    """
    if isinstance(node, nodes.NSRef):
        return node.name in spaces
    if isinstance(node, nodes.Getattr) and is_name(node.node, _LOOP):
        return node.attr in _COUNTERS
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        if is_name(node.node, message):
            return name in _READ
        is_own = isinstance(node.node, nodes.Name) and node.node.name in spaces
        if isinstance(node, nodes.Getitem) or not (is_own or name in _METHODS):
            return False
    if isinstance(node, nodes.Call) and not isinstance(node.node, nodes.Getattr):
        return False
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and is_name(node.node, _MESSAGES)
    if isinstance(node, nodes.Test) and node.name != "string":
        return False
    if isinstance(node, nodes.Name):
        return node.name not in (message, _MESSAGES, _LOOP)
    if isinstance(node, nodes.Output):
        return all(isinstance(each, nodes.TemplateData) and each.data.isspace() for each in node.nodes)
    return is_plain(node) and all(_reads_little(each, message, spaces) for each in node.iter_child_nodes())
