"""A plugin that keeps what is asked of ``/generate``, behind all others."""

from __future__ import annotations

import argparse
from typing import Any

from router_core import hookimpl
from router_core.exchange import Exchange
from router_core.router import Router

__all__ = ["make_plugin"]


class Payloads:
    """Offers a list of them as the component ``payloads``."""

    def __init__(self) -> None:
        self._payloads: list[Any] = []

    @hookimpl
    def setup(self, router: Router) -> None:
        router.components.register("payloads", self._payloads)

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        if exchange.request.path == "/generate":
            self._payloads.append(exchange.request.json())


def make_plugin(options: argparse.Namespace) -> Payloads:
    """Keep them."""
    return Payloads()
