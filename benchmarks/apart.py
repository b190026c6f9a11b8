"""Measurements in processes of their own, which share no memory and no garbage with others."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

from benchmarks.processes import PROXY_CORE

__all__ = ["apart"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def apart(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run ``function`` in a new process on the router's core, and return its result. The process ends with this one."""
    with get_context("spawn").Pool(1, os.sched_setaffinity, (0, {PROXY_CORE})) as process:
        return process.apply(function, args, kwargs)
