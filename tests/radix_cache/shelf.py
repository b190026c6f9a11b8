"""A store of demoted trajectories in a dict, and the plugin that offers it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import anyio.lowlevel

from router_core import hookimpl
from router_core.router import Router

__all__ = ["Shelf", "make_plugin"]


class Shelf:
    """Keeps records. ``refuses``: it keeps nothing more; ``is_closed``: nothing is read. ``refused``: failed writes."""

    def __init__(self, *, wait_s: float = 30.0, stops_on_loss: bool = False) -> None:
        self.records: dict[bytes, bytes] = {}
        self.wait_s = wait_s
        self.stops_on_loss = stops_on_loss
        self.refuses = False
        self.is_closed = False
        self.refused = 0

    @hookimpl
    def setup(self, router: Router) -> None:
        router.components.register("cold_store", self)

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        await anyio.lowlevel.checkpoint()
        if self.refuses:
            self.refused += 1
            raise OSError("no space left on the shelf")
        for key, content in records:
            assert self.records.setdefault(key, content) == content, "a record never changes"
        await anyio.lowlevel.checkpoint()

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        await anyio.lowlevel.checkpoint()
        if self.is_closed:
            raise OSError("the shelf is closed")
        return [self.records.get(key) for key in keys]

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.records.pop(key, None)


def make_plugin(options: argparse.Namespace) -> Shelf:
    return Shelf()
