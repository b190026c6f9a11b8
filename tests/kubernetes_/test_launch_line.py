"""The gateway's published launch line finds pods, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import orjson
import pytest

from compatibility.launching import launched, our_words
from deadlines import HANG_S
from kubernetes_.cluster import Cluster, a_pod
from plugged import Recording
from slime_http.serving import serving

REGULAR = """python -m sglang_router.launch_router \\
  --service-discovery \\
  --selector app=sglang-worker role=inference \\
  --service-discovery-namespace production \\
  --service-discovery-port 8000"""

PAIRS = """python -m sglang_router.launch_router \\
  --pd-disaggregation \\
  --policy cache_aware \\
  --service-discovery \\
  --prefill-selector app=sglang component=prefill \\
  --decode-selector app=sglang component=decode \\
  --service-discovery-namespace sglang-system"""


@pytest.mark.anyio
async def test_the_published_line_finds_pods(
    serve_cluster: Callable[..., AbstractAsyncContextManager[str]],
    cluster: Cluster,
    account: Path,
    in_a_pod: Callable[[str], None],
    pods_port: int,
    tmp_path: Path,
) -> None:
    labels = {"app": "sglang-worker", "role": "inference"}
    words = [*our_words(REGULAR, {"8000": str(pods_port)}), "--service-account-dir", str(account)]
    async with serve_cluster() as url, serving(Recording("pod"), host="127.0.0.2", port=pods_port):
        in_a_pod(url)
        cluster.put(a_pod("p", "127.0.0.2", labels=labels, namespace="production"))
        async with launched(words, tmp_path) as router:
            with anyio.fail_after(HANG_S):
                while (await router.client.get("/readiness")).status_code != 200:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert (await router.client.post("/generate", json={"text": "Hi"})).json() == {"worker": "pod"}
            cluster.status = 500
            cluster.cut()
            with anyio.fail_after(HANG_S):
                while "does not report the pods" not in router.log.read_text():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert (await router.client.post("/generate", json={"text": "Hi"})).status_code == 200
        log = router.log.read_text()
    assert "Traceback" not in log
    assert "the token" not in log
    assert "HTTP Request" not in log


@pytest.mark.anyio
async def test_the_published_line_for_prefill_and_decode_finds_both(
    serve_cluster: Callable[..., AbstractAsyncContextManager[str]],
    cluster: Cluster,
    account: Path,
    in_a_pod: Callable[[str], None],
    pods_port: int,
    tmp_path: Path,
) -> None:
    words = [
        *our_words(PAIRS, {}),
        "--service-discovery-port",
        str(pods_port),
        "--service-account-dir",
        str(account),
    ]
    prefill, decode = Recording("prefill"), Recording("decode")
    async with (
        serve_cluster() as url,
        serving(prefill, host="127.0.0.2", port=pods_port),
        serving(decode, host="127.0.0.3", port=pods_port),
    ):
        in_a_pod(url)
        for last, component in ((2, "prefill"), (3, "decode")):
            labels = {"app": "sglang", "component": component}
            annotations = {"sglang.ai/bootstrap-port": "8998"}
            cluster.put(
                a_pod(
                    f"p-{last}",
                    f"127.0.0.{last}",
                    labels=labels,
                    namespace="sglang-system",
                    annotations=annotations,
                )
            )
        async with launched(words, tmp_path) as router:
            with anyio.fail_after(HANG_S):
                while (await router.client.get("/health")).json()["healthy_workers"] < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert (await router.client.post("/generate", json={"text": "Hi"})).json() == {"worker": "decode"}
    for worker in (prefill, decode):
        (body,) = [orjson.loads(body) for path, _, body in worker.requests if path == "/generate"]
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.2", 8998)
