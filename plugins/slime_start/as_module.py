"""Ctrl-C while ``python -m router_core`` imports the core: this module, imported first, ends the process quietly."""

from __future__ import annotations

from slime_start.interrupts import end_quietly, is_run_as_module

__all__: list[str] = []

if is_run_as_module("router_core"):  # in any other process, SIGINT is none of a library's business
    end_quietly()
