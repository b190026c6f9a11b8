"""Metrics under the names of the SGLang gateway, and weight versions as labels."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from deadlines import until
from metrics.scrapes import EVERYTHING, Numbers, names_of, scraped
from routers import BARE, Start, answering
from slime_http.serving import serving
from slime_metrics import Metrics
from slime_metrics.counts import Counts
from slime_metrics.generations import generation_families
from slime_metrics.labels import Labels
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

METERED = (*BARE, "--plugin", "metrics")

#: All metrics that sglang-router 0.3.2 describes or writes, by the names in its binary; those after the blank line
#: mean something that this router does not have or does not count.
GATEWAY = """
http_connections_active http_rate_limit_total http_request_duration_seconds http_requests_total http_responses_total
router_request_duration_seconds router_request_errors_total router_requests_total router_tokens_total
router_ttft_seconds worker_cb_state worker_cb_transitions_total worker_connections_active worker_health
worker_health_checks_total worker_pool_size worker_requests_active worker_retries_exhausted_total worker_retries_total
worker_routing_keys_active

consistent_hashing_policy_branch_total db_connections_active db_items_stored db_operation_duration_seconds
db_operations_total discovery_deregistrations_total discovery_registrations_total discovery_sync_duration_seconds
discovery_workers_discovered http_inflight_request_age_count manual_policy_branch_total manual_policy_cache_entries
mcp_servers_active mcp_tool_calls_total mcp_tool_duration_seconds mcp_tool_iterations_total
prefix_hash_policy_branch_total router_generation_duration_seconds router_stage_duration_seconds router_tpot_seconds
router_upstream_responses_total worker_cb_consecutive_failures worker_cb_consecutive_successes
worker_cb_outcomes_total worker_errors_total worker_retry_backoff_seconds worker_selection_total
"""


def names(text: str) -> set[str]:
    return {f"smg_{name}" for name in text.split()}


async def test_each_metric_of_the_gateway_is_there_or_has_a_substitute(start: Start) -> None:
    same, other = GATEWAY.split("\n\n")
    async with start(*EVERYTHING) as running:
        exposed = names_of((await running.client.get("/metrics")).text)
    assert {name for name in exposed if name.startswith("smg_")} == names(same)
    page = (Path(__file__).parents[2] / "docs" / "plugins" / "sglang.md").read_text()
    rows = page.partition("## Metrics of the gateway")[2].splitlines()
    cells = [row.split(" | ") for row in rows if row.startswith("| `smg_")]
    listed = [name for row in cells for name in re.findall(r"`(smg_\w+)`", row[0])]
    assert sorted(listed) == sorted(names(other))
    substitutes = {name for row in cells for name in re.findall(r"`((?:smg|slime)_\w+[a-z])`", row[1])}
    assert len(substitutes) > 6
    assert substitutes - exposed.keys() == set()


def of_generations(numbers: Numbers) -> Numbers:
    return {
        key: number
        for key, number in numbers.items()
        if key[0].startswith("smg_router_request") and key[0].endswith(("_total", "_count"))
    }


async def test_generations_count_by_endpoint_and_error(start: Start) -> None:
    async with start(*METERED, "--api-key", "k") as running:
        assert (await running.client.post("/generate", json={})).status_code == 401  # refused, so not counted
        running.client.headers["authorization"] = "Bearer k"
        assert (await running.client.post("/generate", json={})).status_code == 503
        async with serving(answering(b"{}")) as worker:
            await running.router.add_worker(worker)
            for path in ("/generate", "/generate", "/v1/completions", "/tokenize"):
                assert (await running.client.post(path, json={})).status_code == 200
        found = of_generations(await scraped(running.client))
    assert found == {
        ("smg_router_requests_total", "endpoint=generate"): 3,
        ("smg_router_requests_total", "endpoint=completions"): 1,
        ("smg_router_request_errors_total", "endpoint=generate error_type=no_workers"): 1,
        ("smg_router_request_duration_seconds_count", "endpoint=generate"): 2,
        ("smg_router_request_duration_seconds_count", "endpoint=completions"): 1,
    }


@pytest.mark.parametrize(
    ("status", "worker", "error_type"),
    [
        (400, "", "validation_error"),
        (404, "", "no_workers"),
        (503, "", "no_workers"),
        (503, "http://w", "backend_error"),
        (504, "http://w", "timeout"),
        (408, "http://w", "timeout"),
        (429, "http://w", "internal_error"),
        (429, "", None),
        (499, "http://w", None),
    ],
)
def test_errors_have_the_gateways_types(status: int, worker: str, error_type: str | None) -> None:
    counts = Counts([1.0], lambda: 0.0)
    counts.know(Labels(()))
    if worker:
        counts.worker_added(worker)
    counts.of("POST", "/generate", status, worker).observe(0.5, 0.0)
    errors = [
        sample.labels["error_type"]
        for family in generation_families(counts)
        for sample in family.samples
        if sample.name == "smg_router_request_errors_total"
    ]
    assert errors == ([] if error_type is None else [error_type])


async def test_probes_count_by_result(start: Start) -> None:
    line = (*METERED, "--plugin", "health", "--health-check-interval-secs", "1")
    async with start(*line) as running:
        metrics: Metrics = running.router.components.get("metrics")

        def probes() -> set[object]:
            found = metrics.numbers("smg_worker_health_checks_total")
            assert isinstance(found, dict)
            return {*found}

        async with serving(FakeEngine().app) as worker:
            await running.router.add_worker(worker)
            await until(lambda: ("regular", "success") in probes())
        await until(lambda: ("regular", "failure") in probes())
        found = await scraped(running.client)
    assert found["smg_worker_health_checks_total", "result=success worker_type=regular"] >= 1
    assert found["smg_worker_health_checks_total", "result=failure worker_type=regular"] >= 1


async def test_sessions_in_flight_and_connections_show(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: {"text": "x", "meta_info": {}}
    engine.delay = anyio.Event()
    async with serving(engine.app) as worker, start(*METERED, "--worker-urls", worker) as running:

        async def ask(session: str) -> None:
            await running.client.post("/generate", json={"text": "x"}, headers={"x-session-id": session})

        async with anyio.create_task_group() as tasks:
            for session in ("ada", "ada", "bob"):
                tasks.start_soon(ask, session)
            await until(lambda: len(engine.asked) == 3)
            during = await scraped(running.client)
            engine.delay.set()
        after = await scraped(running.client)
    assert during["smg_worker_routing_keys_active", f"worker={worker}"] == 2
    assert during["smg_http_connections_active", ""] == during["slime_requests_in_flight", ""] == 3
    assert during["smg_worker_connections_active", ""] == 3
    assert after["smg_worker_routing_keys_active", f"worker={worker}"] == 0


async def test_only_the_present_weight_versions_are_labels(start: Start) -> None:
    line = (*METERED, "--plugin", "control")
    versions = ("step-1", "step-2", 'odd "name"\nof a version')
    async with serving(FakeEngine().app) as worker, start(*line, "--worker-urls", worker) as running:
        for version in versions:
            await running.client.post("/weight_version", json={"weight_version": version})
            text = (await running.client.get("/metrics")).text
            found = await scraped(running.client)
            of_fleet = [labels for name, labels in found if name == "slime_weight_version_info"]
            of_worker = [labels for name, labels in found if name == "slime_worker_weight_version_info"]
            assert of_fleet == [f"version={version}"], text
            assert of_worker == [f"version={version} worker={worker}"]
        assert ("slime_weight_version", "") not in found
