"""The manifests of deploy/kubernetes: they fit the schemas, kustomize builds them, and their pod is the chart's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from deadlines import HANG_S
from deploy.deployed import DEPLOY, check_flags
from programs import program

yaml = pytest.importorskip("yaml")
kubernetes = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: pip install kubernetes-validate"
)

FOLDER = DEPLOY / "kubernetes"
RELEASES = ("1.25", "1.37")
Objects = dict[str, dict[str, Any]]


def kustomization() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    return found


def listed() -> Objects:
    names = kustomization()["resources"]
    documents = [each for name in names for each in yaml.safe_load_all((FOLDER / name).read_text())]
    objects = {each["kind"]: each for each in documents}
    assert len(objects) == len(documents)
    return objects


def labelled() -> Objects:
    """The listed objects with the labels and the selectors that kustomize adds."""
    (added,) = kustomization()["labels"]
    assert added["includeSelectors"]
    labels, objects = added["pairs"], listed()
    for each in objects.values():
        each["metadata"]["labels"] = labels
    deployment = objects["Deployment"]["spec"]
    deployment["selector"] = {"matchLabels": labels}
    deployment["template"]["metadata"] = {"labels": labels}
    objects["Service"]["spec"]["selector"] = labels
    return objects


def test_kustomization_lists_each_file() -> None:
    names = kustomization()["resources"]
    assert {*names, "kustomization.yaml"} == {path.name for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", listed())
def test_each_object_fits_the_schema_of_kubernetes(kind: str, release: str) -> None:
    """Without kubectl."""
    kubernetes.validate(labelled()[kind], release, strict=True)


@pytest.mark.parametrize("kind", listed())
def test_schema_of_each_object_refuses_a_misspelt_field(kind: str) -> None:
    objects = labelled()
    objects[kind]["metdata"] = objects[kind].pop("metadata")
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(objects[kind], RELEASES[0], strict=True)


def test_built_objects_fit_the_schemas_of_kubernetes() -> None:
    command = [program("kubectl"), "kustomize", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    built: Objects = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert built.keys() == {*listed(), "ConfigMap"}
    for each in built.values():
        for release in RELEASES:
            kubernetes.validate(each, release, strict=True)
    for kind, mine in labelled().items():
        assert built[kind]["metadata"]["labels"] == mine["metadata"]["labels"]
        assert built[kind].get("spec", {}).get("selector") == mine.get("spec", {}).get("selector")
    template = built["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    for selector in (
        built["Service"]["spec"]["selector"],
        built["Deployment"]["spec"]["selector"]["matchLabels"],
        built["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector
    # A changed file gets another name, so the pod is replaced.
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == built["ConfigMap"]["metadata"]["name"] != "slime-router"


def test_objects_are_those_of_the_chart() -> None:
    """For the same values; names, labels and comments apart."""
    helm = pytest.importorskip("helm_python", reason="helm is not installed: pip install helm-python-sdk")
    values = {
        "fullnameOverride": "slime-router",
        "discovery": {"enabled": True, "selector": {"app": "sglang"}, "namespace": "default"},
        "keys": {"existingSecret": "slime-router-keys"},
        "persistence": {"keep": False},
    }
    with helm.Chart.load(str(DEPLOY / "helm" / "slime-router")) as chart:
        rendered = chart.render(values, name="slime-router", namespace="default")
    texts = [text for name, text in rendered.items() if not name.endswith("NOTES.txt")]
    charts: Objects = {each["kind"]: each for text in texts for each in yaml.safe_load_all(text) if each}
    config = charts.pop("ConfigMap")
    plain = listed()
    assert plain.keys() == charts.keys()
    for kind, mine in plain.items():
        for part in ("spec", "rules", "roleRef", "subjects", "automountServiceAccountToken"):
            assert without_labels(mine.get(part)) == without_labels(charts[kind].get(part)), f"{kind}: {part}"
    # What the flags say is the same too.
    wanted = flags_of(config["data"]["slime-router.conf"])
    assert flags_of((FOLDER / "slime-router.conf").read_text()) == wanted


def without_labels(part: Any) -> Any:
    """``part`` without what kustomize adds, or the chart has for its own reasons."""
    if isinstance(part, list):
        return [without_labels(each) for each in part]
    if not isinstance(part, dict):
        return part
    left_out = ("selector", "labels", "metadata", "image", "optional")
    return {key: without_labels(value) for key, value in part.items() if key not in left_out}


def flags_of(text: str) -> set[str]:
    return {line for line in text.splitlines() if line and not line.startswith("#")}


def test_flags_are_known_and_fit_the_role(tmp_path: Path) -> None:
    options = check_flags((FOLDER / "slime-router.conf").read_text(), tmp_path / "flags")
    assert options["service_discovery_namespace"] == listed()["Role"]["metadata"]["namespace"]
    uncommented = (
        (FOLDER / "slime-router.conf").read_text().replace("# plugin", "plugin").replace("# hf-", "hf-")
    )
    exact = uncommented.replace("# trajectory", "trajectory").replace("plugin = [state]\n", "")
    assert check_flags(exact, tmp_path / "exact")["plugin"] == ["state", "radix_cache", "openai"]
