"""Routers with the flags that trainers make of ``RouterArgs`` serve the engines that these register.

The trainers are slime (``slime/ray/rollout.py``) and miles (``miles/backends/sglang_utils/router_args_utils.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from compatibility.gateway import GATEWAY
from compatibility.launching import generates, launched, without_effect

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


def rendered(**fields: Any) -> list[str]:
    """``RouterArgs`` with these fields as a command line, as miles renders it: what differs from the defaults."""
    words: list[str] = []
    for name, value in fields.items():
        theirs = GATEWAY[f"--{name.replace('_', '-')}"]
        if value != theirs.default:
            words += [
                theirs.flag,
                *([] if value is True else map(str, value if isinstance(value, list) else [value])),
            ]
    return words


SLIME = {
    "balance_abs_threshold": 0,
    "prometheus_port": 4321,
    "log_level": "warn",
    "request_timeout_secs": 14400,
}

#: Beside slime's, which a process is started with.
TRAINERS: dict[str, dict[str, Any]] = {
    "slime of 2026": {
        "prometheus_port": 4321,
        "log_level": "warn",
        "request_timeout_secs": 28800,
        "policy": "round_robin",
        "disable_health_check": True,
    },
    "slime with sessions": SLIME | {"policy": "consistent_hashing", "balance_abs_threshold": 64},
    "miles": {
        "policy": "manual",
        "assignment_mode": "min_load",
        "prometheus_port": 9000,
        "log_level": "warn",
        "request_timeout_secs": 14400,
        "disable_circuit_breaker": True,
        "retry_max_retries": 60,
        "worker_startup_timeout_secs": 600,
    },
}


async def registers(client: httpx.AsyncClient, workers: dict[str, str]) -> None:
    """An engine is registered as slime does it, and is asked."""
    payload = {"url": workers["http://worker1:8000"], "worker_type": "regular"}
    assert (await client.post("/workers", json=payload)).status_code == 202
    await generates(client)


async def test_router_started_by_slime_serves_registered_engines(
    workers: dict[str, str], tmp_path: Path
) -> None:
    words = rendered(host="127.0.0.1", port=3456, **SLIME)
    async with launched(words, tmp_path) as router:
        await registers(router.client, workers)
        assert router.idle_flags() == []


@pytest.mark.parametrize("fields", TRAINERS.values(), ids=TRAINERS)
async def test_router_of_a_trainers_flags_serves_registered_engines(
    fields: dict[str, Any], start: Start, workers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    words = rendered(host="127.0.0.1", port=3456, **fields)
    async with start(
        *words, *(["--prometheus-port", "0"] if "--prometheus-port" in words else [])
    ) as running:
        await registers(running.client, workers)
    assert without_effect(caplog.messages) == []
