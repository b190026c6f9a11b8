"""Shares of the events in one router's life."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALM", "WORLDS", "World"]


@dataclass(frozen=True)
class World:
    """Shares of requests: answered with ``lies``, with ``fields`` that no router knows, with ``media``.

    ``twins``: the share of answers that read like another one to the same prompt. ``borrows``: of prompts in which a
    client writes another's answer. ``crowds``: of requests beside another one of the same session. ``adapters``:
    those that sample. ``shapes``: aborts have all of SGLang's. ``headers``: sessions are named in every way.
    """

    lies: float = 0.0
    fields: float = 0.0
    media: float = 0.0
    twins: float = 0.0
    borrows: float = 0.0
    crowds: float = 0.0
    adapters: tuple[str | None, ...] = ()
    shapes: bool = False
    headers: bool = False


CALM = World()
WORLDS = {
    "calm": World(borrows=0.1),
    "twins": World(twins=0.6, borrows=0.4, crowds=0.3, headers=True),
    "liars": World(lies=0.35, twins=0.3, borrows=0.3, shapes=True),
    "odd": World(
        fields=0.1, media=0.05, twins=0.2, borrows=0.2, adapters=("A", "B", None), shapes=True, headers=True
    ),
    "all": World(0.05, 0.05, 0.03, 0.4, 0.3, 0.2, ("A", None), shapes=True, headers=True),
}
