"""docs/how-to/policy-plugin.md: the package that it makes, as its reader would have it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from installing import install
from router_core import Exchange, Worker
from router_core.cli import build
from router_core.request import Request
from wheels import ROOT

PAGE = (ROOT / "docs" / "how-to" / "policy-plugin.md").read_text()
_FILE = re.compile(r"Save this as `([\w.]+)`\..*?\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_package_of_the_page_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, content in _FILE.findall(PAGE):
        (package / name).write_text(content)
    assert sorted(path.name for path in package.iterdir()) == [
        "newest_policy.py",
        "pyproject.toml",
        "test_newest_policy.py",
    ]
    monkeypatch.syspath_prepend(install(package, tmp_path))
    router, _ = build(["--policy", "newest"])
    for port, version in ((1, "6"), (2, "7"), (3, "default")):
        router.pool.add(Worker(f"http://10.0.0.1:{port}", weight_version=version))
    request = Exchange(Request("POST", b"/generate", [], b"{}"))
    chosen = router.hooks.select_worker(request, tuple(router.pool))
    assert chosen is not None
    assert chosen.url == "http://10.0.0.1:2"

    monkeypatch.syspath_prepend(package)
    tests = importlib.import_module("test_newest_policy")
    tests.test_the_policy_keeps_the_contract()
    tests.test_newest_weights_come_first()
    for name in ("newest_policy", "test_newest_policy"):
        monkeypatch.delitem(sys.modules, name)
