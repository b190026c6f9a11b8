"""A plugin for tiny runs, which loads the tokenizer without transformers. The import of transformers takes seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from router_core import hookimpl
from router_core.router import Router
from slime_engine.tokenizer import EngineTokenizer

__all__ = ["QuickTokenizer", "add_options", "make_plugin", "provides"]

#: The component that the plugin registers.
provides = ("tokenizer",)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick-tokenizer", type=Path, required=True, metavar="DIR")


def make_plugin(options: argparse.Namespace) -> QuickTokenizer:
    return QuickTokenizer(options.quick_tokenizer)


class QuickTokenizer:
    """Registers the tokenizer saved in ``directory``. Its special tokens must be those of the embedded engine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @hookimpl(tryfirst=True)
    def setup(self, router: Router) -> None:
        bpe = Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        router.components.register("tokenizer", EngineTokenizer(bpe))
