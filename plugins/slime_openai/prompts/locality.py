"""Proof that a chat template is local: the text behind a message does not depend on messages before its predecessor.

The proof reads the template's source. A template is proved to be local if it has one loop over all messages, and keeps
these rules. No state passes from one round of the loop to the next. Each round after the first reads only its own
message, the two beside it, and the last message. Behind the loop, only the last message is read.

Before this loop a template may search for the index of a message, see ``searches``. A round may compare its own index
with the found one. Then the text behind a message also depends on the results of these comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import Environment, TemplateError, nodes

from slime_openai.prompts.plain_nodes import is_const, is_name, is_plain
from slime_openai.prompts.searches import Member, Search, SearchNodes, take_searches

__all__ = ["Proof", "prove", "trials"]

_MESSAGES, _LOOP = "messages", "loop"
#: Filters whose values can be read several times. Other filters may return an iterator, which is empty the second time.
_LASTING = frozenset(
    ("d", "default", "join", "length", "lower", "replace", "string", "tojson", "trim", "upper")
)
#: Members of ``loop`` that do not change if earlier messages are left out. The direct predecessor is never left out.
_UNCOUNTED = frozenset(("first", "last", "nextitem", "previtem", "revindex", "revindex0"))

Message: TypeAlias = Mapping[str, Any]
#: A part of a template: before the loop over messages, in a round of this loop, in an inner loop of a round, or behind
#: the loop over messages. Macros count as "behind".
_Where: TypeAlias = Literal["before", "round", "part", "behind"]


class Proof(NamedTuple):
    """A proof that a template is local. ``search``: the searches whose results are used in rounds, or None."""

    search: Search | None


@lru_cache(maxsize=8)
def prove(source: str) -> Proof | None:
    """Return the proof that the template in ``source`` is local. If there is no proof, return None."""
    try:
        tree = Environment(autoescape=False).parse(source)
    except TemplateError:
        return None
    searches = take_searches(tree.body)
    reading = _Reading(searches)
    if not all(map(is_plain, tree.find_all(nodes.Node))) or not reading.proves(tree.body):
        return None
    return Proof(Search(searches, reading.members) if reading.members else None)


class _Reading:
    """One reading of a template without its ``searches``, from beginning to end.

    ``_tainted``: names whose values may depend on messages. ``members``: the results of searches with which rounds
    compare their own indexes.
    """

    def __init__(self, searches: SearchNodes) -> None:
        self._searches = searches
        self._fixed = searches.spaces | {_MESSAGES, _LOOP}
        self._tainted = {*self._fixed}
        self._macros: list[nodes.Macro] = []
        self._where: _Where = "before"
        self.members: dict[Member, None] = {}

    def proves(self, body: list[nodes.Node]) -> bool:
        """Return True if ``body``, a whole template, is proved to be local."""
        if not self._read(body, is_certain=True) or self._where != "behind":
            return False
        return all(
            self._is_near(each, "behind") for macro in self._macros for each in macro.iter_child_nodes()
        )

    def _read(self, body: Iterable[nodes.Node], *, is_certain: bool) -> bool:
        """Return False if ``body`` prevents the proof. ``is_certain``: no message decides if ``body`` is rendered."""
        return all(self._read_one(node, is_certain=is_certain) for node in body)

    def _read_one(self, node: nodes.Node, *, is_certain: bool) -> bool:
        if isinstance(node, nodes.Macro):
            self._macros.append(node)
            return is_certain and node.name not in self._tainted
        if isinstance(node, nodes.If):
            return self._read_branches(node, is_certain=is_certain)
        if isinstance(node, nodes.For) and is_name(node.iter, _MESSAGES):
            return is_certain and self._read_loop(node)
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            return self._read_assignment(node, is_certain=is_certain)
        return self._is_near(node, self._where)

    def _read_branches(self, node: nodes.If, *, is_certain: bool) -> bool:
        tests = [node.test, *(each.test for each in node.elif_)]
        if not all(self._is_near(test, self._where) for test in tests):
            return False
        is_certain = is_certain and all(self._is_near(test, "behind") for test in tests)
        bodies = (node.body, *(each.body for each in node.elif_), node.else_)
        return all(self._read(body, is_certain=is_certain) for body in bodies)

    def _read_assignment(self, node: nodes.Assign | nodes.AssignBlock, *, is_certain: bool) -> bool:
        name = node.target
        if not isinstance(name, nodes.Name) or name.name in self._fixed:
            return False
        values = [each for each in node.iter_child_nodes() if each is not name]
        lasts = all(each.name in _LASTING for value in values for each in _filters(value))
        if not is_certain or not lasts or not all(self._is_near(each, "behind") for each in values):
            self._tainted.add(name.name)
        return all(self._is_near(each, self._where) for each in values)

    def _read_loop(self, loop: nodes.For) -> bool:
        """Read the loop over messages. There may be only one."""
        is_first, self._where = self._where == "before", "behind"
        if not is_first or loop.test is not None or loop.else_ or loop.recursive:
            return False
        return isinstance(loop.target, nodes.Name) and all(
            self._is_near(each, "round") for each in (loop.target, *loop.body)
        )

    def _is_near(self, node: nodes.Node, where: _Where) -> bool:
        """Return True if ``node`` reads only messages that may be read in the part ``where``. O(nodes in ``node``)."""
        if isinstance(node, nodes.Macro):
            return False  # a macro here would see the names around it
        if isinstance(node, nodes.For):
            own = [node.target, node.iter]
            within: _Where = "part" if where in ("round", "part") else where
            inner = [*node.body, *node.else_, *([node.test] if node.test is not None else [])]
            is_near = all(self._is_near(each, where) for each in own)
            return is_near and not node.recursive and all(self._is_near(each, within) for each in inner)
        if isinstance(node, nodes.Getitem) and is_name(node.node, _MESSAGES):
            return _is_readable(node.arg, where)
        if where == "round":
            if _is_uncounted(node) or _asks_if_first(node) or _is_only_for_first(node):
                return True
            if (member := self._searches.compared(node)) is not None:
                self.members[member] = None
                return True
        if isinstance(node, nodes.Name):
            if node.name == _MESSAGES or node.name not in self._tainted:
                return node.name != _MESSAGES
            return where == "before" or (where == "part" and node.name == _LOOP)
        return all(self._is_near(each, where) for each in node.iter_child_nodes())


def _filters(node: nodes.Node) -> Iterator[nodes.Filter]:
    if isinstance(node, nodes.Filter):
        yield node
    yield from node.find_all(nodes.Filter)


def _counter(node: nodes.Node) -> str | None:
    """Return the name of the member of ``loop`` that ``node`` reads; None if it reads no such member."""
    if isinstance(node, nodes.Getattr) and is_name(node.node, _LOOP):
        return node.attr
    return None


def _is_uncounted(node: nodes.Node) -> bool:
    return _counter(node) in _UNCOUNTED


def _asks_if_first(node: nodes.Node) -> bool:
    """Return True for a comparison with one result in all rounds after the first, such as ``loop.index0 == 0``."""
    first = {"index": 1, "index0": 0}
    if not isinstance(node, nodes.Compare) or len(node.ops) != 1:
        return False
    counter, [other] = _counter(node.expr), node.ops
    return counter in first and other.op in ("eq", "gt", "ne") and is_const(other.expr, first[counter])


def _is_only_for_first(node: nodes.Node) -> bool:
    """Return True for ``loop.first and ...``: after the first round this is false, whatever else it reads."""
    return isinstance(node, nodes.And) and _counter(node.left) == "first"


def _is_readable(place: nodes.Node, where: _Where) -> bool:
    """Return True if the message at ``place`` may be read.

    Every part may read the last message. The part before the loop may also read the first message. A round may read
    its own message and both neighbours.
    """
    if is_const(place, -1):
        return True
    if where == "before":
        return is_const(place, 0)
    if where != "round":
        return False
    if isinstance(place, nodes.Add | nodes.Sub):
        return _counter(place.left) == "index0" and is_const(place.right, 1)
    return _counter(place) in ("index", "index0")


def trials() -> Iterator[tuple[list[Message], int]]:
    """Yield conversations of many shapes to try a template on, each with the index of an assistant's message."""
    call = {"type": "function", "id": "call00001", "function": {"name": "probed", "arguments": {"a": "b"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "7", "tool_call_id": "call00001"}
    system, user, silent = _said("system", "!"), _said("user", "?"), _said("user", "")
    answer, thinking = _said("assistant", "!"), {**_said("assistant", "!"), "reasoning_content": "."}
    beginnings: Sequence[Sequence[Message]] = (
        [user, answer, user],
        [system, user, thinking, user],
        [system, silent, calling, result],
        [user, calling, result, answer, user, calling, result, result],
        [system, *[user, answer] * 12, user],
    )
    ends: Sequence[Sequence[Message]] = (
        [],
        [user],
        [silent, thinking, system, user],
        [result],
        [result, result, answer, user],
        [user, calling, result],
    )
    replies = cycle((answer, thinking, calling, {**calling, "content": "!"}, _said("assistant", "")))
    for begin in beginnings:
        for end in ends:
            yield [*begin, next(replies), *end], len(begin)


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
