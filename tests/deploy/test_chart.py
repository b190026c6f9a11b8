"""The Helm chart: rendered by Helm itself, checked against Kubernetes' schemas and the router's own parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from deploy.deployed import DEPLOY, check_flags
from routers import Start

yaml = pytest.importorskip("yaml")
helm = pytest.importorskip("helm_python", reason="helm is not installed: pip install helm-python-sdk")
kubernetes = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: pip install kubernetes-validate"
)

CHART = DEPLOY / "helm" / "slime-router"
Values = dict[str, Any]
Objects = dict[str, dict[str, Any]]

#: Each value that adds or changes an object.
FULL: Values = {
    "plugins": ["radix_cache", "openai"],
    "config": {
        "hf-checkpoint": "/models/m",
        "max-payload-size": 536870912,
        "health-check-interval-secs": 2.5,
        "access-log": True,
        "request-id-headers": ["x-request-id", "x-trace-id"],
    },
    "workerUrls": ["http://10.0.0.1:30000", "http://10.0.0.2:30000"],
    "discovery": {"enabled": True, "selector": {"app": "sglang", "role": "rollout"}, "namespace": "engines"},
    "keys": {"existingSecret": "router-keys"},
    "tls": {"existingSecret": "router-tls"},
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "serviceMonitor": {"enabled": True, "engines": True},
    "imagePullSecrets": [{"name": "registry"}],
    "persistence": {"storageClass": "fast"},
    "priorityClassName": "rl",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "rl", "operator": "Exists"}],
    "extraEnv": [{"name": "SLIME_ROUTER_LOG_FORMAT", "value": "json"}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "podLabels": {"team": "rl"},
    "podAnnotations": {"note": "x"},
    "service": {"annotations": {"note": "x"}},
    "serviceAccount": {"annotations": {"note": "x"}},
}
PAIRS: Values = {
    "config": {"pd-disaggregation": True},
    "discovery": {
        "enabled": True,
        "prefillSelector": {"component": "prefill"},
        "decodeSelector": {"component": "decode"},
    },
}
REPLICAS: Values = {"replicaCount": 2, "independentReplicas": True, "persistence": {"enabled": False}}
VARIANTS = {"default": {}, "full": FULL, "pairs": PAIRS, "replicas": REPLICAS}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(str(CHART)) as loaded:
        yield loaded


def render(chart: Any, values: Values) -> Objects:
    """The objects by kind; there is one of each."""
    chart.validate_schema(values)
    rendered = chart.render(values, name="demo", namespace="rl")
    texts = [text for name, text in rendered.items() if not name.endswith("NOTES.txt")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each is not None]
    objects = {each["kind"]: each for each in found}
    assert len(objects) == len(found)
    return objects


def pod(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(objects: Objects) -> dict[str, Any]:
    (found,) = pod(objects)["containers"]
    assert isinstance(found, dict)
    return found


def flags(objects: Objects, file: Path) -> dict[str, object]:
    """The options that the ConfigMap gives, with a certificate that exists."""
    (text,) = objects["ConfigMap"]["data"].values()
    for name in ("tls.crt", "tls.key"):
        file.with_name(name).touch()
    return check_flags(text.replace("/etc/slime-router-tls", str(file.parent)), file)


def test_helm_lint_finds_nothing() -> None:
    for values in VARIANTS.values():
        report = helm.lint(str(CHART), values=values, strict=True)
        assert report["errors"] == []
        assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_version_of_the_chart_is_that_of_the_project() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == version("slime-router")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("release", ["1.25", "1.37"])
def test_objects_fit_the_schemas_of_kubernetes(chart: Any, variant: str, release: str) -> None:
    objects = render(chart, VARIANTS[variant])
    # No schema of the Prometheus operator is at hand.
    objects.pop("ServiceMonitor", None)
    assert len(objects) >= 5
    for each in objects.values():
        kubernetes.validate(each, release, strict=True)


def test_schemas_of_kubernetes_refuse_a_misspelt_field(chart: Any) -> None:
    objects = render(chart, {})
    pod(objects)["restartpolicy"] = "Always"
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(objects["Deployment"], "1.37", strict=True)


def test_values_make_the_flags_that_they_say(chart: Any, tmp_path: Path) -> None:
    options = flags(render(chart, FULL), tmp_path / "full")
    wanted = {
        "host": "0.0.0.0",
        "port": 30000,
        "plugin": ["state", "radix_cache", "openai"],
        "worker_urls": ["http://10.0.0.1:30000", "http://10.0.0.2:30000"],
        "max_payload_size": 536870912,
        "health_check_interval_secs": 2.5,
        "access_log": True,
        "request_id_headers": ["x-request-id", "x-trace-id"],
        "service_discovery": True,
        "service_discovery_namespace": "engines",
        "selector": {"app": "sglang", "role": "rollout"},
        "tls_cert_path": str(tmp_path / "tls.crt"),
    }
    assert {name: options[name] for name in wanted} == wanted
    assert str(options["state_dir"]) == "/var/lib/slime-router/state"
    assert str(options["trajectory_log"]) == "/var/lib/slime-router/trajectories"
    pairs = flags(render(chart, PAIRS), tmp_path / "pairs")
    assert pairs["prefill_selector"] == {"component": "prefill"}
    assert pairs["decode_selector"] == {"component": "decode"}
    assert flags(render(chart, REPLICAS), tmp_path / "replicas")["plugin"] == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicaCount": 2}, "install the chart once for each router"),
        ({"replicaCount": 2, "independentReplicas": True}, "only one router may use a --state-dir"),
        ({"discovery": {"enabled": True}}, "wanted the labels"),
        ({"config": {"api-key": "secret"}}, "api-key"),
        ({"config": {"port": 80}}, "port"),
        ({"config": {"policy": {"name": "random"}}}, "config"),
        ({"discover": {}}, "discover"),
        ({"workerUrls": ["10.0.0.1"]}, "workerUrls"),
        ({"probes": {"readinessPath": "/"}}, "readinessPath"),
    ],
)
def test_mistakes_in_values_are_refused(chart: Any, values: Values, told: str) -> None:
    with pytest.raises(helm.HelmError, match=told):
        render(chart, values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pod_has_no_rights_and_a_read_only_root(chart: Any, variant: str) -> None:
    objects = render(chart, VARIANTS[variant])
    assert pod(objects)["securityContext"]["runAsNonRoot"] is True
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The API's token is there for the discovery only.
    assert pod(objects)["automountServiceAccountToken"] is ("Role" in objects)
    assert pod(objects)["enableServiceLinks"] is False


def test_pod_ends_after_the_drain(chart: Any, tmp_path: Path) -> None:
    for grace_s, pause_s in ((180, 5), (30, 0)):
        values = {"shutdownGracePeriodSeconds": grace_s, "preStopSeconds": pause_s}
        objects = render(chart, values)
        assert flags(objects, tmp_path / "flags")["shutdown_grace_period_secs"] == grace_s
        assert pod(objects)["terminationGracePeriodSeconds"] == grace_s + pause_s + 20
        assert ("lifecycle" in container(objects)) is bool(pause_s)


def test_selectors_find_the_pod_and_names_agree(chart: Any) -> None:
    objects = render(chart, FULL)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    service = objects["Service"]
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        service["spec"]["selector"],
    ]
    assert [selector for selector in selectors if not selector.items() <= labels.items()] == []
    monitor = objects["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert {each["port"] for each in monitor["endpoints"]} == {port["name"]}
    assert [each["path"] for each in monitor["endpoints"]] == ["/metrics", "/engine_metrics"]
    assert [each["name"] for each in container(objects)["ports"]] == [port["targetPort"]]
    mounts = {mount["name"] for mount in container(objects)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod(objects)["volumes"]}
    binding, role = objects["RoleBinding"], objects["Role"]
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"] == "engines"
    assert binding["subjects"][0]["name"] == objects["ServiceAccount"]["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == "rl"


def test_another_config_starts_another_pod(chart: Any) -> None:
    def annotations(values: Values) -> dict[str, str]:
        found: dict[str, str] = render(chart, values)["Deployment"]["spec"]["template"]["metadata"][
            "annotations"
        ]
        return found

    assert annotations({}) != annotations({"config": {"policy": "random"}})


def test_notes_warn_of_what_is_missing(chart: Any) -> None:
    def notes(values: Values) -> str:
        return str(chart.render(values, name="demo", namespace="rl")["slime-router/templates/NOTES.txt"])

    assert "no key is set" in notes({})
    assert "It has no workers yet" in notes({})
    assert "share nothing" in notes(REPLICAS)
    assert "WARNING" not in notes(FULL)
    assert "[app=sglang, role=rollout] in the namespace engines become workers" in notes(FULL)


@pytest.mark.anyio
async def test_router_with_the_flags_of_the_chart_answers_its_probes(
    chart: Any, start: Start, tmp_path: Path
) -> None:
    """Without any worker, so that workers can register through the Service."""
    objects = render(chart, {})
    (text,) = objects["ConfigMap"]["data"].values()
    text = re.sub(r"^(host|port) = .*\n", "", text, flags=re.MULTILINE)
    file = tmp_path / "flags"
    file.write_text(text.replace("/var/lib/slime-router", str(tmp_path)))
    args = [
        word.replace("/etc/slime-router/slime-router.conf", str(file)) for word in container(objects)["args"]
    ]
    assert str(file) in args
    async with start(*args) as running:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container(objects)[probe]["httpGet"]["path"]
            assert (await running.client.get(path)).status_code == 200, probe
    assert (tmp_path / "state" / "state.lock").exists()
