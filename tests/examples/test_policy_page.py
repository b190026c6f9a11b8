"""Pages about policies: the package that docs/how-to/policy-plugin.md makes, and the hook of docs/hooks.md."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from installing import install
from router_core import Exchange, Worker, hookimpl
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


def test_the_hook_of_the_page_of_hooks_chooses_by_labels() -> None:
    section = (ROOT / "docs" / "hooks.md").read_text().partition("## select_worker(")[2].partition("\n## ")[0]
    code = re.search(r"^( {4}@hookimpl\n(?: {4}.*\n)+)", section, re.MULTILINE)
    assert code is not None
    names: dict[str, Any] = {
        "hookimpl": hookimpl,
        "Exchange": Exchange,
        "Worker": Worker,
        "Sequence": Sequence,
    }
    exec(f"class Policy:\n{code[1]}", names)  # the code of the page
    plain, fast = (Worker("http://10.0.0.1:30000"), Worker("http://10.0.0.2:30000", labels={"pool": "fast"}))
    choose = names["Policy"]().select_worker
    research = Exchange(Request("POST", b"/generate", [(b"x-team", b"research")], b"{}"))
    assert choose(research, [plain, fast]) is fast
    assert choose(research, [plain]) is None
    assert choose(Exchange(Request("POST", b"/generate", [], b"{}")), [plain, fast]) is None
