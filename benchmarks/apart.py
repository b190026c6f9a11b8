"""Measurements in processes of their own, which share no memory and no garbage with others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import ParamSpec, TypeVar

from benchmarks.options import Options
from benchmarks.processes import PROXY_CORE

__all__ = ["Apart", "apart"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Apart:
    """Runs functions on the router's core, each in a process of its own; in a tiny run, all in one other process."""

    def __init__(self, processes: Pool) -> None:
        self._processes = processes

    def __call__(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``function`` in another process, and return its result."""
        return self._processes.apply(function, args, kwargs)


@contextmanager
def apart(options: Options) -> Iterator[Apart]:
    """Yield an :class:`Apart`, whose processes end with the block."""
    calls = options.pick(1, tiny=None)
    core = os.sched_setaffinity, (0, {PROXY_CORE})
    with get_context("spawn").Pool(1, *core, maxtasksperchild=calls) as processes:
        yield Apart(processes)
