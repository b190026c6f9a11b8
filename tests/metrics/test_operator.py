"""An operator answers three questions with the request log and the metrics alone.

Which worker is slow? Who was refused? Why did a request wait?
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import anyio
import httpx
import pytest

from deadlines import until
from metrics.scrapes import Numbers, scraped
from routers import Start
from slime_http.serving import serving
from slime_logging import JsonLines
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

FLAGS = (
    "--access-log", "--disable-health-check", "--policy", "round_robin", "--api-key", "sec-ret-k",
    "--admin-api-key", "sec-ret-a", "--control-plane-api-keys", "ann:Ann:user:sec-ret-n",
    "--max-concurrent-requests", "1", "--queue-size", "1", "--cb-failure-threshold", "1",
    "--cb-timeout-duration-secs", "0.2",
)  # fmt: skip
SLOW_S = 0.1
REASONS = ("queue", "pause", "retry")


def engine(delay_s: float = 0.0) -> FakeEngine:
    """Return an engine that takes ``delay_s`` for an answer."""

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        await anyio.sleep(delay_s)
        return {"text": "a", "meta_info": {}}

    made = FakeEngine()
    made.rest = answer
    return made


@dataclass
class Operator:
    """Reads the lines of requests by their ids, and scrapes: nothing else of the router."""

    lines: Mapping[str, dict[str, Any]]
    numbers: Numbers

    def slowest_worker(self) -> str:
        """The worker with the longest mean time, by the metrics and by the log."""
        name = "slime_worker_duration_seconds"
        workers = [
            labels for metric, labels in self.numbers if metric == f"{name}_count" and labels != "worker="
        ]
        means = {
            each: self.numbers[f"{name}_sum", each] / self.numbers[f"{name}_count", each] for each in workers
        }
        times: dict[str, list[float]] = defaultdict(list)
        for line in self.lines.values():
            if "worker" in line:
                times[line["worker"]].append(line["duration_s"] - line["to_worker_s"])
        slowest = max(times, key=lambda worker: mean(times[worker]))
        assert max(means, key=means.__getitem__) == f"worker={slowest}"
        return slowest

    def refusals(self) -> dict[str, tuple[str, str | None]]:
        """The code and the caller of each refused request. The metrics count as many of each code."""
        found = {
            name: (line["error"], line.get("caller"))
            for name, line in self.lines.items()
            if line["status"] in (401, 403, 408, 429)
        }
        for code in ("UNAUTHORIZED", "FORBIDDEN", "QUEUE_FULL"):
            counted = sum(
                number
                for (name, labels), number in self.numbers.items()
                if name == "smg_http_responses_total" and f"error_code={code} " in labels
            )
            assert counted == [error for error, _ in found.values()].count(code)
        return found

    def wait(self, name: str) -> str:
        """The reason why the request waited longest."""
        line = self.lines[name]
        waits = {reason: line.get(f"{reason}_s", 0.0) for reason in REASONS}
        reason = max(waits, key=waits.__getitem__)
        assert 0 < waits[reason] <= line["duration_s"]
        return reason


async def test_log_and_metrics_answer_the_questions_of_an_operator(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    quick, slow = engine(), engine(SLOW_S)
    async with (
        serving(quick.app) as quick_url,
        serving(slow.app) as slow_url,
        start(*FLAGS, "--worker-urls", quick_url, slow_url) as running,
    ):
        client = running.client

        async def send(name: str, path: str = "/generate", key: str = "sec-ret-k") -> httpx.Response:
            headers = {"x-request-id": name, "authorization": f"Bearer {key}"}
            return await client.post(path, json={"text": "a"}, headers=headers)

        for number in range(4):
            assert (await send(f"even-{number}")).status_code == 200
        assert (await send("stranger", key="sec-ret-wrong")).status_code == 401
        assert (await send("ann", "/add_worker", "sec-ret-n")).status_code == 403

        assert (await send("pausing", "/pause_generation", "sec-ret-a")).status_code == 200
        client.headers["authorization"] = "Bearer sec-ret-a"
        async with anyio.create_task_group() as tasks:
            for name, metric in (("paused", "slime_requests_paused"), ("queued", "slime_requests_queued")):
                tasks.start_soon(send, name)
                while (await scraped(client))[metric, ""] != 1:  # noqa: ASYNC110  # as an operator sees it
                    await anyio.sleep(0.01)
            during = await scraped(client)
            assert (await send("too-many")).status_code == 429
            assert (await send("going-on", "/continue_generation", "sec-ret-a")).status_code == 200

        for each in (quick, slow):
            each.script.append((500, b""))
        assert (await send("held")).status_code == 200
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        after = await scraped(client)
        text = (await client.get("/metrics")).text

    written = [JsonLines().format(record) for record in caplog.records]
    lines = [json.loads(line) for line in written if '"logger":"slime_access_log"' in line]
    operator = Operator({line["id"]: line for line in lines}, after)

    assert operator.slowest_worker() == slow_url

    assert operator.refusals() == {
        "stranger": ("UNAUTHORIZED", None),
        "ann": ("FORBIDDEN", "ann"),
        "too-many": ("QUEUE_FULL", operator.lines["too-many"]["caller"]),
    }
    assert operator.lines["stranger"]["client"].startswith("127.0.0.1:")
    assert not [line for line in [*written, text] if "sec-ret" in line]

    assert [operator.wait(name) for name in ("paused", "queued", "held")] == ["pause", "queue", "retry"]
    assert during["slime_generation_paused", ""] == 1
    waits = {reason: after["slime_request_wait_seconds_sum", f"reason={reason}"] for reason in REASONS}
    told = {reason: sum(line.get(f"{reason}_s", 0.0) for line in lines) for reason in REASONS}
    assert waits == pytest.approx(told, abs=0.02)
    assert operator.lines["held"]["held"] == [f"{url} circuit breaker" for url in (quick_url, slow_url)]
    assert after["smg_worker_cb_transitions_total", "from=closed to=open"] == 2
    assert not {"queue_s", "pause_s", "retry_s", "held"} & operator.lines["even-0"].keys()
