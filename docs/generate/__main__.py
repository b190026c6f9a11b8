"""Builds the site in build/site: ``python -m docs.generate``, with ``--serve`` to look at it in a browser."""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path

from docs.generate import client, diagrams, errors, flags, hooks, http, metrics
from docs.generate.changelog import with_unreleased
from docs.generate.pages import ROOT, Links, assets, sources

#: Links to the reference, by the hand-written page that gets them. Only the site has the reference, so the files of the
#: pages cannot have these links.
_MORE = {
    "hooks.md": "[signatures](reference/hooks.md)",
    "http-api.md": "[each operation with parameters, bodies and answers](reference/http/index.md)",
    "operations.md": "[all flags](reference/flags.md) and [all error codes](reference/errors.md)",
    "plugins/metrics.md": "[all metrics](../reference/metrics.md)",
    "plugins/radix_cache.md": "[the Python client](../reference/client.md)",
}
_GATEWAY = ROOT / "shims" / "sglang_router" / "sglang_router" / "router_args.py"


def stage(folder: Path) -> None:
    """Write all pages of the site into ``folder``, as Zensical wants them."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = sources()
    links = Links({**pages, **assets()})
    for source, page in pages.items():
        text = (ROOT / source).read_text()
        if source == "CHANGELOG.md":
            text = with_unreleased(text, ROOT)
        text = links.rewrite(text, source)
        more = f"\n\nReference, made from the code: {_MORE[page]}.\n" if page in _MORE else ""
        _write(folder / page, diagrams.replace(text, page) + more)
    for page, text in reference().items():
        _write(folder / page, text)
    for source, path in {**assets(), **links.files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, folder / path)


def reference() -> dict[str, str]:
    """Return the paths and texts of the pages that are made from the code."""
    return {
        "reference/flags.md": flags.page(_gateway_flags()),
        "reference/hooks.md": hooks.page(),
        "reference/metrics.md": metrics.page(),
        "reference/errors.md": errors.page(),
        "reference/client.md": client.page(),
        **{f"reference/http/{name}": text for name, text in http.pages().items()},
    }


def _gateway_flags() -> frozenset[str]:
    """Return the names of the gateway's arguments, from the shim, which need not be installed."""
    tree = ast.parse(_GATEWAY.read_text())
    fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """Stage the pages, and let Zensical build or serve them. Return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site on http://127.0.0.1:8000")
    serve = parser.parse_args().serve
    stage(ROOT / "build" / "docs")
    command = [sys.executable, "-m", "zensical", *(["serve"] if serve else ["build", "--strict", "--clean"])]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
