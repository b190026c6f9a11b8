"""Figures computed from scrapes, without a router."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slime_top.figures import Figures, History
from slime_top.scrape import Samples, Scrape
from slime_top.screen import frame

WORKER = {
    "url": "http://10.0.0.7:30000",
    "state": "quarantined",
    "holds": {"health": "connection refused", "circuit breaker": "open"},
    "load": 3,
    "weight_version": None,
}


def scrape(at: float, text: str, *, started: float = 100.0) -> Scrape:
    """A scrape of a router with one worker; ``text``: its metrics."""
    always = f"process_start_time_seconds {started}\nslime_requests_in_flight 3\n"
    return Scrape(at, [WORKER], "7", Samples(always + text))


def counts(*cumulative: int, path: str = "/generate") -> str:
    """A histogram with bounds of 0.1, 1 and 10 seconds, and the requests that reached a worker."""
    bounds = ("0.1", "1", "10", "+Inf")
    name = "smg_http_request_duration_seconds_bucket"
    lines = [
        f'{name}{{method="POST",path="{path}",le="{bound}"}} {count}'
        for bound, count in zip(bounds, cumulative, strict=True)
    ]
    lines.append('slime_time_to_worker_seconds_count{path="/generate"} 1')
    lines.append(f'slime_requests_total{{path="{path}",status="200",worker="http://w"}} {cumulative[-1]}')
    return "\n".join(lines) + "\n"


def history(*scrapes: Scrape) -> History:
    found = History()
    for each in scrapes:
        found.add(each)
    return found


def drawn(found: History) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(frame(found.figures(now=100), "http://r"))
    return console.export_text()


def test_quantiles_are_interpolated_in_their_buckets() -> None:
    figures = history(scrape(0, counts(0, 80, 100, 100))).figures(now=100)
    assert figures.latency is not None
    assert figures.latency.p50 == pytest.approx(0.1 + 0.9 * 50 / 80)
    assert figures.latency.p95 == pytest.approx(1 + 9 * 15 / 20)
    assert figures.latency_span_s is None


def test_exactness_is_unknown_without_records() -> None:
    told = "unknown without the plugin radix_cache"
    assert told in drawn(history(scrape(0, "")))
    assert told not in drawn(history(scrape(0, "slime_cache_tokens 0\n")))


def test_failed_requests_alone_have_no_latency_of_workers() -> None:
    assert "no request to a worker has ended" in drawn(history(scrape(0, "")))


def test_a_quantile_above_all_bounds_is_the_largest_bound() -> None:
    latency = history(scrape(0, counts(0, 0, 0, 5))).figures(now=100).latency
    assert latency is not None
    assert latency.p50 == 10


def test_latencies_are_those_of_the_last_minute() -> None:
    figures = history(
        scrape(0, counts(100, 100, 100, 100)),
        scrape(90, counts(100, 100, 100, 100)),
        scrape(100, counts(100, 110, 110, 110)),
    ).figures(now=100)
    assert figures.latency is not None
    assert figures.latency.p50 == pytest.approx(0.55)
    assert figures.latency_span_s == 10


def test_the_routers_own_answers_are_no_latencies() -> None:
    text = counts(0, 0, 10, 10, path="/generate") + counts(1000, 1000, 1000, 1000, path="/metrics").replace(
        'worker="http://w"', 'worker=""'
    )
    figures = history(scrape(0, counts(0, 0, 0, 0)), scrape(5, text)).figures(now=100)
    assert figures.latency is not None
    assert figures.latency.p50 > 1
    assert figures.requests_per_s == 2


def test_a_router_that_started_again_has_no_rates_of_before() -> None:
    begun = history(scrape(0, counts(50, 50, 50, 50)), scrape(2, counts(1, 1, 1, 1), started=200))
    assert begun.figures(now=202).requests_per_s is None
    assert begun.figures(now=202).up_s == 2
    begun.add(scrape(4, counts(5, 5, 5, 5), started=200))
    assert begun.figures(now=204).requests_per_s == 2


def test_the_hit_rate_is_that_of_the_last_minute() -> None:
    def prompts(hits: int, misses: int) -> str:
        name = "slime_cache_prompts_total"
        return f'{name}{{result="hit"}} {hits}\n{name}{{result="miss"}} {misses}\n'

    begun = history(scrape(0, prompts(0, 100)))
    assert begun.figures(now=0).cache_hit_rate == 0
    begun.add(scrape(10, prompts(30, 110)))
    assert begun.figures(now=10).cache_hit_rate == 0.75
    begun.add(scrape(200, prompts(30, 110)))
    assert begun.figures(now=200).cache_hit_rate == pytest.approx(30 / 140)


def test_a_frame_names_what_holds_a_worker() -> None:
    text = (
        'smg_worker_cb_state{worker="http://10.0.0.7:30000"} 1\n'
        'smg_http_responses_total{status_code="429",error_code="QUEUE_FULL"} 4\n'
        'smg_http_responses_total{status_code="200",error_code=""} 9\n'
        'slime_incomplete_answers_total{path="/generate",worker="w",error="WORKER_BROKE"} 2\n'
        'slime_incomplete_answers_total{path="/generate",worker="w",error="client_gone"} 5\n'
        'slime_generations_total{path="/generate",reason="exact"} 5\n'
        'slime_generations_total{path="/generate",reason="batch"} 2\n'
        'slime_generations_total{path="/v1/completions",reason="batch"} 1\n'
        "slime_cache_tokens 7\nslime_weight_version_age_seconds 600\nsmg_worker_retries_total 5\n"
    )
    shown = drawn(history(scrape(0, text)))
    assert "weights 7 for 10 min" in shown
    assert "4 QUEUE_FULL, 2 WORKER_BROKE\n" in "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
    assert "5 retries" in shown
    assert "sampled    5 exact, 3 not: 3 batch" in shown
    row = next(line for line in shown.splitlines() if "10.0.0.7:30000" in line)
    assert row.strip().split(maxsplit=6) == [
        "10.0.0.7:30000", "quarantined", "3", "-", "-", "open",
        "health: connection refused; circuit breaker: open",
    ]  # fmt: skip


def shown_lines(figures: Figures, width: int) -> list[str]:
    """The lines of a frame at a terminal of ``width`` columns."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(frame(figures, "http://r"))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_long_values_do_not_cut_the_labels(width: int) -> None:
    text = "".join(
        f'smg_http_responses_total{{status_code="502",error_code="WORKER_BROKE_{number}"}} 1\n'
        f'slime_retrieved_answers_total{{reason="uncovered_text_{number}"}} 1\n'
        for number in range(20)
    )
    lines = shown_lines(history(scrape(0, text)).figures(now=100), width)
    labels = [line.split("  ")[0] for line in lines[2:9]]
    assert labels == ["fleet", "traffic", "errors", "latency", "tokens", "sampled", "retrieved"]
    assert max(map(len, lines)) <= width
    assert lines[4].endswith("…")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("worker http://w:1 cannot be reached: Connection refused", "cannot be reached: Connection refused"),
        ("http://w:1: no answer", "no answer"),
        ("its weights are older than those of worker http://w:12", "its weights are older than those of worker http://w:12"),
    ],
)  # fmt: skip
def test_a_reason_does_not_repeat_the_workers_own_url(reason: str, told: str) -> None:
    worker = WORKER | {"url": "http://w:1", "holds": {"health": reason}}
    figures = history(Scrape(0, [worker], "7", Samples(""))).figures(now=100)
    row = next(line for line in shown_lines(figures, 140) if line.startswith("w:1 "))
    assert row.rstrip().endswith(f" health: {told}")
