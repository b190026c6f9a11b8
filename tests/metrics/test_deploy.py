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
_SELECTOR = re.compile(r"\b((?:smg|slime|process)_\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
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
        cells = line.split(" | ")
        if line.startswith("| `") and len(cells) == 4:
            for name in cells[0].removeprefix("| ").split(", "):
                found[name.strip("`")] = set(re.findall(r"`(\w+)`", cells[2]))
    return found


@pytest.mark.anyio
async def test_expressions_name_metrics_that_exist(start: Start) -> None:
    async with start(*EVERYTHING) as running:
        exposed = names_of((await running.client.get("/metrics")).text)
    histograms = {name for name, kind in exposed.items() if kind == "histogram"}
    known = labels()
    asked: set[str] = set()
    for title, expression in expressions():
        for name in _NAME.findall(expression):
            base = _SUFFIX.sub("", name)
            asked.add(base if base in histograms else name)
            assert name in exposed or base in histograms, f"{title}: {name}"
        for name, selectors in _SELECTOR.findall(expression):
            base = _SUFFIX.sub("", name)
            wanted = set(_LABEL.findall(selectors)) - {"instance", "le"}
            assert wanted <= known.get(name, known.get(base, set())), f"{title}: {name} has no such label"
    assert len(asked) > 40


def test_expressions_are_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for _, expression in expressions():
        parser.parse(expression.replace("$__rate_interval", "5m"))


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
