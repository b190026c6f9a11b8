"""Checks that the radix cache of a router recorded the answers of a benchmark, with the exact tokens."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from benchmarks.report import Report

__all__ = ["check_all_recorded", "check_exact"]

_TIMEOUT_S = 60.0


async def check_all_recorded(report: Report, url: str) -> None:
    """Report a problem if the router at ``url`` could not record an answer."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S) as client:
        lost = (await client.get("/cache_stats")).raise_for_status().json()["unrecorded"]
    if lost:
        report.problem(f"the radix cache could not record all answers: {lost}")


async def check_exact(report: Report, url: str, text: str, place: int, sampled_ids: Sequence[int]) -> None:
    """Report a problem if the tokens of ``text`` are not exact, or are not ``sampled_ids`` from token ``place`` on."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S) as client:
        reply = await client.post("/retrieve_from_text", json={"text": text})
    found = reply.raise_for_status().json()
    if not found["exact"]:
        report.problem(f"the tokens of an answer are not exact: {found['inexact_reason']}")
    elif found["tokens"][place : place + len(sampled_ids)] != list(sampled_ids):
        report.problem("the tokens of an answer are not those that were sampled")
