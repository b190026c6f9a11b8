"""Protocols of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from router_core import Exchange, Worker

__all__ = ["Corrected", "Policy", "Remembering", "Selective"]


class Policy(Protocol):
    """Chooses among the workers that can be used now. A policy runs in the event loop, so it must not block."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        """Return one of ``workers`` for ``exchange``. ``workers`` is never empty, and may differ from call to call."""
        ...


@runtime_checkable
class Remembering(Policy, Protocol):
    """A policy whose state about workers, such as the contents of their caches, can become invalid."""

    def forget(self, worker: Worker) -> None:
        """Drop the state of ``worker``, which joins, leaves, stops getting requests or gets requests again."""
        ...

    def forget_all(self) -> None:
        """Drop the state of all workers' caches: new weights made it invalid, or the caches were flushed."""
        ...


@runtime_checkable
class Corrected(Policy, Protocol):
    """A policy that is told how many tokens of each prompt the worker had in its cache."""

    def answered(self, exchange: Exchange, prompt_tokens: int, cached_tokens: int) -> None:
        """Note, for ``exchange``, the tokens of its prompt, and how many of them the worker had in its cache."""
        ...


@runtime_checkable
class Selective(Corrected, Protocol):
    """A policy that learns from some answers only. Other answers need not be searched for numbers of cached tokens."""

    def expects(self, exchange: Exchange) -> bool:
        """Return True when the policy learns from the answer to ``exchange``."""
        ...
