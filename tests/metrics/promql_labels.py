"""Labels of the series that a PromQL expression yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["NoSuchLabel", "labels_of"]

promql = pytest.importorskip("promql_parser")


class NoSuchLabel(Exception):
    """An expression names a label that its series do not have."""


def labels_of(expression: str, known: Callable[[str], set[str]]) -> set[str]:
    """Return the labels of the result of ``expression``. Raises NoSuchLabel.

    ``known``: returns the labels of a metric. Prometheus adds ``instance``.
    """
    return _Labels(known).of(promql.parse(expression.replace("$__rate_interval", "5m")))


class _Labels:
    def __init__(self, known: Callable[[str], set[str]]) -> None:
        self._known = known

    def of(self, node: Any) -> set[str]:
        """Return the labels of the result of ``node``."""
        match type(node).__name__:
            case "VectorSelector":
                return self._selected(node)
            case "MatrixSelector":
                return self.of(node.vector_selector)
            case "AggregateExpr":
                return self._aggregated(node)
            case "BinaryExpr":
                return self._combined(node)
            case "Call":
                found = set().union(*(self.of(each) for each in node.args))
                return set() if node.func.name == "absent" else found - _dropped(node.func.name)
            case "NumberLiteral" | "StringLiteral":
                return set()
        return self.of(node.expr)

    def _selected(self, node: Any) -> set[str]:
        found = self._known(node.name) | {"instance"} | ({"le"} if node.name.endswith("_bucket") else set())
        _check({each.name for each in node.matchers.matchers}, found, node)
        return found

    def _aggregated(self, node: Any) -> set[str]:
        found = self.of(node.expr)
        if node.modifier is None:
            return set()
        named = set(node.modifier.labels)
        _check(named, found, node)
        return named if node.modifier.type == promql.AggModifierType.By else found - named

    def _combined(self, node: Any) -> set[str]:
        left, right = self.of(node.lhs), self.of(node.rhs)
        if node.modifier is not None and node.modifier.matching is not None:
            _check(set(node.modifier.matching.labels), left & right, node)
        return left or right


def _dropped(function: str) -> set[str]:
    return {"le"} if function == "histogram_quantile" else set()


def _check(named: set[str], found: set[str], node: Any) -> None:
    if not named <= found:
        raise NoSuchLabel(f"{', '.join(sorted(named - found))} in {node}")
