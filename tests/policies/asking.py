"""Requests for a policy to choose for, workers to choose from, and their loads."""

from __future__ import annotations

import random
from typing import Any

from router_core import Exchange, Worker
from router_core.request import Request
from slime_policies.counting import Counting
from slime_policies.tokens_in_flight import TokensInFlight
from slime_testing import Running

__all__ = ["Clock", "asking", "generate", "load_in", "ready", "words"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyz "


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def asking(body: bytes = b"", *, session: str | None = None) -> Exchange:
    """A generation with ``body``."""
    return Exchange(Request("POST", b"/generate", [], body), session=session)


def words(seed: int, size: int = 2000) -> str:
    """A text of ``size`` letters."""
    return "".join(random.Random(seed).choices(_ALPHABET, k=size))


def generate(prompt: str) -> Exchange:
    """A generation with the text ``prompt``."""
    return asking(b'{"sampling_params": {"temperature": 1}, "text": "%s"}' % prompt.encode())


def ready(*loads: int) -> list[Worker]:
    """Workers with so many requests in flight."""
    return [Worker(f"http://127.0.0.1:{port}", in_flight=load) for port, load in enumerate(loads, 1)]


def load_in(running: Running, worker: Worker) -> TokensInFlight:
    """The loads among which ``worker`` was chosen, with ``--load tokens`` or ``engine``."""
    sender: Any = running.router.sender
    while not isinstance(sender, Counting):
        sender = sender._inner
    load = sender._load_of(worker)
    assert load is not None
    return load
