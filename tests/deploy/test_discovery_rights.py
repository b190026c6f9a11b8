"""The rights of the chart's Role are those that the discovery of pods uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from deploy.deployed import DEPLOY
from kubernetes_.cluster import Cluster, a_pod
from plugged import Recording, until
from routers import Start
from slime_http.serving import serving

yaml = pytest.importorskip("yaml")
helm = pytest.importorskip("helm_python", reason="helm is not installed: pip install helm-python-sdk")


def rendered(port: int) -> dict[str, Any]:
    """The chart's objects by kind, with discovery of pods at ``port``."""
    discovery = {"enabled": True, "selector": {"app": "sglang"}, "namespace": "engines", "port": port}
    values = {"discovery": discovery, "persistence": {"enabled": False}}
    with helm.Chart.load(str(DEPLOY / "helm" / "slime-router")) as chart:
        texts = chart.render(values, name="demo", namespace="rl")
    documents = [text for name, text in texts.items() if not name.endswith("NOTES.txt")]
    return {each["kind"]: each for text in documents for each in yaml.safe_load_all(text) if each}


def account(folder: Path) -> trustme.LeafCert:
    """Write a service account's files to ``folder``, and return the certificate of the API."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    (folder / "token").write_text("the token")
    return authority.issue_cert("127.0.0.1")


@pytest.mark.anyio
async def test_role_allows_what_the_discovery_asks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = str(tmp_path / "server.pem")
    account(tmp_path).private_key_and_cert_chain_pem.write_to_path(certificate)
    cluster = Cluster(token="the token")
    async with serving(Recording()) as engine, serving(cluster, ssl_certfile=certificate) as url:
        objects = rendered(urlsplit(engine).port or 0)
        (text,) = objects["ConfigMap"]["data"].values()
        file = tmp_path / "flags"
        file.write_text(re.sub(r"^(host|port) = .*\n", "", text, flags=re.MULTILINE))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(urlsplit(url).port))
        cluster.put(a_pod("p", "127.0.0.1", labels={"app": "sglang"}, namespace="engines"))
        # Pods of another namespace, or with other labels, are no workers.
        cluster.put(a_pod("q", "127.0.0.2", labels={"app": "sglang"}, namespace="rl"))
        cluster.put(a_pod("r", "127.0.0.3", labels={"app": "other"}, namespace="engines"))
        async with start("--config", str(file), "--service-account-dir", str(tmp_path)) as running:
            await until(lambda: [worker.url for worker in running.router.pool] == [engine])
            await until(lambda: bool(cluster.watchers))
        cluster.cut()
    (rule,) = objects["Role"]["rules"]
    namespace = objects["Role"]["metadata"]["namespace"]
    allowed = {f"/api/v1/namespaces/{namespace}/{resource}" for resource in rule["resources"]}
    assert {path for path, _ in cluster.asked} == allowed
    verbs = {"watch" if "watch" in query else "list" for _, query in cluster.asked}
    assert verbs == set(rule["verbs"])
