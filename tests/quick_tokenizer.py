"""A plugin for routers in processes of their own: the embedded engine's tokenizer, without transformers.

The import of transformers takes longer than the rest of a start. Tests that kill routers do not test the loading of a
checkpoint.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from router_core.router import Router
from slime_engine.tokenizer import corpus_documents, train_tokenizer

__all__ = ["make_plugin", "provides"]

#: The component that the plugin registers.
provides = ("tokenizer",)


def make_plugin(_: argparse.Namespace) -> QuickTokenizer:
    return QuickTokenizer()


class QuickTokenizer:
    """Registers the tokenizer that each embedded engine has."""

    @hookimpl(tryfirst=True)
    def setup(self, router: Router) -> None:
        router.components.register("tokenizer", train_tokenizer(corpus_documents()))
