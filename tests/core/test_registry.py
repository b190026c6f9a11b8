"""Components that plugins share."""

from __future__ import annotations

import pytest

from router_core.errors import MissingComponent, PluginError
from router_core.registry import ComponentRegistry


def test_a_component_is_found_under_its_name() -> None:
    registry = ComponentRegistry()
    tokenizer = object()
    registry.register("tokenizer", tokenizer)
    assert registry.get("tokenizer") is tokenizer
    assert "tokenizer" in registry
    assert "trajectories" not in registry


def test_a_missing_component_is_told_with_the_known_ones() -> None:
    registry = ComponentRegistry()
    with pytest.raises(MissingComponent, match=r"component 'tokenizer' is missing \(registered: none\)"):
        registry.get("tokenizer")
    registry.register("b", 1)
    registry.register("a", 2)
    with pytest.raises(MissingComponent, match=r"registered: a, b\); load the plugin that offers it"):
        registry.get("tokenizer")
    with pytest.raises(MissingComponent, match=r"registered: a, b\); give --hf-checkpoint PATH"):
        registry.get("tokenizer", "give --hf-checkpoint PATH")


def test_a_name_is_given_once() -> None:
    registry = ComponentRegistry()
    registry.register("tokenizer", 1)
    with pytest.raises(PluginError, match="component 'tokenizer' is registered twice"):
        registry.register("tokenizer", 2)
    assert registry.get("tokenizer") == 1


@pytest.mark.parametrize("name", ["", "  "])
def test_a_component_needs_a_name(name: str) -> None:
    with pytest.raises(PluginError, match="a component needs a name"):
        ComponentRegistry().register(name, 1)


@pytest.mark.parametrize("falsy", [None, 0, "", []])
def test_a_falsy_component_is_there(falsy: object) -> None:
    registry = ComponentRegistry()
    registry.register("falsy", falsy)
    assert "falsy" in registry
    assert registry.get("falsy") is falsy
