"""Builds the site in build/site: ``python -m docs.generate``, with ``--serve`` to look at it in a browser."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from docs.generate.diagrams import Diagrams
from docs.generate.pages import ROOT, Links, assets, sources


def stage(folder: Path) -> None:
    """Write all pages of the site into ``folder``, as Zensical wants them."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = sources()
    links = Links({**pages, **assets()})
    diagrams = Diagrams(folder / "diagrams")
    for source, page in pages.items():
        text = links.rewrite((ROOT / source).read_text(), source)
        _write(folder / page, diagrams.replace(text, page))
    for source, path in {**assets(), **links.files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, folder / path)


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
