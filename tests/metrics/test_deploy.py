"""The dashboard and the alert rules ask for metrics and labels that a router has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrics.scrapes import EVERYTHING, names_of
from routers import Start

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
_NAME = re.compile(r"\b(?:smg|slime|process)_\w+")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_ANNOTATION = re.compile(r"\{\{\s*\$labels\.(\w+)\s*\}\}")
_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "grafana" / "slime-router.json").read_text())
    return document


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def labels() -> dict[str, set[str]]:
    """The labels of each metric, by the page."""
    page = (DEPLOY.parent / "docs" / "plugins" / "metrics.md").read_text()
    found: dict[str, set[str]] = {}
    for line in page.splitlines():
        cells = re.split(r" \|(?= )", line)
        if line.startswith("| `") and len(cells) == 4:
            for name in cells[0].removeprefix("| ").split(", "):
                found[name.strip("`")] = set(re.findall(r"`(\w+)`", cells[2]))
    return found


@pytest.mark.anyio
async def test_expressions_name_metrics_that_exist(start: Start) -> None:
    async with start(*EVERYTHING) as running:
        exposed = names_of((await running.client.get("/metrics")).text)
    histograms = {name for name, kind in exposed.items() if kind == "histogram"}
    asked: set[str] = set()
    for title, expression in expressions():
        for name in _NAME.findall(expression):
            base = _SUFFIX.sub("", name)
            asked.add(base if base in histograms else name)
            assert name in exposed or base in histograms, f"{title}: {name}"
    assert len(asked) > 40


def known_labels(metric: str) -> set[str]:
    known = labels()
    return known[metric] if metric in known else known[_SUFFIX.sub("", metric)]


def test_expressions_and_legends_name_labels_that_exist() -> None:
    parts = pytest.importorskip("metrics.promql_labels")
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            shown = set(_LEGEND.findall(target["legendFormat"]))
            assert shown <= parts.labels_of(target["expr"], known_labels), f"{panel['title']}: {shown}"
    for rule in alerts():
        shown = set(_ANNOTATION.findall(" ".join(rule["annotations"].values())))
        assert shown <= parts.labels_of(rule["expr"], known_labels), f"{rule['alert']}: {shown}"


@pytest.mark.parametrize(
    "expression",
    [
        "sum by (nonsense) (slime_workers)",
        "sum without (nonsense) (slime_workers)",
        'slime_workers{nonsense="a"}',
        "sum by (le) (slime_workers)",
        "sum by (state) (slime_workers) / on (nonsense) slime_workers",
        "sum by (state) (sum by (instance) (slime_workers))",
    ],
)
def test_label_that_does_not_exist_is_found(expression: str) -> None:
    parts = pytest.importorskip("metrics.promql_labels")
    with pytest.raises(parts.NoSuchLabel):
        parts.labels_of(expression, known_labels)


def test_variables_name_labels_that_exist() -> None:
    queries = [each["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert queries
    for query in queries:
        found = _VALUES.fullmatch(query["query"])
        assert found, query
        assert found[2] in known_labels(found[1]) | {"instance"}


def test_dashboard_shows_waits_and_store() -> None:
    shown = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ()))
    of_the_store = {name for name in labels() if name.startswith("slime_store_")}
    assert len(of_the_store) > 10
    assert {name for name in {"slime_request_wait_seconds", *of_the_store} if name not in shown} == set()


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    fields = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(fields) == len(set(fields))
    assert max(x for x, _ in fields) < 24


def test_alerts_say_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
