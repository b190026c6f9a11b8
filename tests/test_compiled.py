"""The hot modules are compiled in a wheel that is built with ``SLIME_ROUTER_COMPILE=1``, and in no other."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

from compiled import hot_modules
from router_core.cli import is_compiled
from wheels import ROOT

MODULES = hot_modules(ROOT)
EXPECTED = os.environ.get("TOX_ENV_NAME") == "compiled"


@pytest.mark.parametrize("path", MODULES)
def test_a_hot_module_is_compiled_in_a_compiled_wheel_only(path: str) -> None:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert module.__file__ is not None
    assert module.__file__.endswith(".so" if EXPECTED else ".py")
    beside = Path(module.__file__).parent / Path(path).name
    assert beside.is_file(), "its source is there for tracebacks"


@pytest.mark.parametrize("path", MODULES)
def test_a_hot_module_has_no_class_attributes_that_mypyc_refuses(path: str) -> None:
    source = ROOT / ("" if path.startswith("router_core/") else "plugins") / path
    classes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef)]
    set_in_classes = [
        target
        for one in classes
        for node in one.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    assert all(isinstance(target, ast.Name) for target in set_in_classes), "one attribute in each assignment"


def test_the_router_knows_that_it_is_compiled() -> None:
    assert is_compiled() == EXPECTED
