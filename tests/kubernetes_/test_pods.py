"""Pods, as read from the API's documents."""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_.cluster import a_pod
from slime_kubernetes import Pod

LABELS = {"app": "engine"}


def seen(**about: Any) -> Pod:
    document = a_pod("p", about.pop("ip", "10.0.0.7"), labels=LABELS, **about)
    document["metadata"]["uid"] = "u"
    return Pod.of(document)


def test_a_pod_that_runs_and_is_ready_serves() -> None:
    pod = seen(namespace="production", annotations={"sglang.ai/bootstrap-port": "8998", "other": "x"})
    assert pod == Pod("u", "production/p", LABELS, "10.0.0.7", "serving", "8998")
    assert pod.url(8000) == "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    "about", [{"ready": False}, {"phase": "Pending"}, {"ip": None}, {"phase": "Unknown"}]
)
def test_incomplete_pod_is_awaited(about: dict[str, Any]) -> None:
    assert seen(**about).state == "coming"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pod_with_ended_containers_has_ended_also_during_deletion(phase: str) -> None:
    document = a_pod("p", "10.0.0.7", labels=LABELS, phase=phase, ready=False)
    document["metadata"] |= {"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert Pod.of(document).state == "ended"


def test_terminating_pod_leaves_though_it_is_ready() -> None:
    document = a_pod("p", "10.0.0.7", labels=LABELS)
    document["metadata"] |= {"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert Pod.of(document).state == "leaving"


def test_unscheduled_pod_has_no_status() -> None:
    pod = Pod.of({"metadata": {"uid": "u", "name": "p"}})
    assert (pod.state, pod.address, pod.labels) == ("coming", None, {})


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert seen(ip="fd00::7").url(80) == "http://[fd00::7]:80"


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        *(("uid", 7), ("uid", ["u"]), ("labels", ["app=engine"]), ("annotations", "x")),
        *(("annotations", {"sglang.ai/bootstrap-port": 8998}), ("podIP", 7), ("podIP", ["10.0.0.7"])),
        *(("status", "Running"), ("conditions", ["Ready"])),
    ],
)
def test_malformed_document_is_refused_when_it_is_read(where: str, wrong: object) -> None:
    document = a_pod("p", "10.0.0.7", labels=LABELS)
    document["metadata"]["uid"] = "u"
    kept = (
        document
        if where == "status"
        else document["status" if where in ("podIP", "conditions") else "metadata"]
    )
    kept[where] = wrong
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Pod.of(document)
