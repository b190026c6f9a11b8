"""Pods are workers from when they are ready until they end."""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from holding import stale
from kubernetes_.cluster import Cluster, a_pod
from kubernetes_.conftest import LABELS, Discover, Discovered
from plugged import routing, until
from router_core.cli import build
from router_core.errors import SettingsError
from router_core.pool import WorkerPool
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings as Engine
from slime_kubernetes import Discovery, Pod, Settings, make_plugin
from slime_kubernetes.pod_workers import PodWorkers
from slime_sglang.facts import bootstrap_port

pytestmark = pytest.mark.anyio


async def asked(found: Discovered, times: int = 8) -> set[str]:
    """Return the workers that answer."""
    answers = [await found.running.client.post("/ask") for _ in range(times)]
    return {answer.json()["worker"] for answer in answers}


async def test_ready_pods_become_workers_whenever_they_came(discover: Discover, cluster: Cluster) -> None:
    async with discover() as found:
        await found.engine(2)
        await found.engine(3)
        found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        found.pod(3)
        await until(lambda: found.states() == {2: "ready", 3: "ready"})
        assert await asked(found) == {"127.0.0.2", "127.0.0.3"}
        (worker,) = (await found.running.client.get("/workers")).json()["workers"][1:]
        assert worker["labels"] == {"kubernetes_pod": "default/p-3", "kubernetes_uid": "uid-2"}
        assert (worker["worker_type"], worker["bootstrap_port"]) == ("regular", None)


async def test_a_real_engine_in_a_pod_generates(discover: Discover) -> None:
    async with discover() as found:
        await found.engine(2, make_app(Engine(), load_model))
        found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        answer = await found.running.client.post(
            "/generate",
            json={"text": "Hi", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
        )
        assert answer.json()["meta_info"]["completion_tokens"] == 4


async def test_only_pods_with_all_labels_in_the_namespace_count(discover: Discover) -> None:
    selector = "--selector app=engine tier=gpu --service-discovery-namespace training"
    async with discover(selector=selector) as found:
        both = LABELS | {"tier": "gpu"}
        for last, (namespace, labels) in enumerate(
            (("training", LABELS), ("default", both), ("training", both | {"more": "x"})), start=2
        ):
            found.pod(last, namespace=namespace, labels=labels)
        await until(lambda: found.states() == {4: "joining"})
        path, query = found.cluster.asked[0]
        assert path == "/api/v1/namespaces/training/pods"
        assert query["labelSelector"] == "app=engine,tier=gpu"


async def test_without_a_namespace_all_of_them_are_looked_at(discover: Discover) -> None:
    async with discover() as found:
        found.pod(2, namespace="one")
        found.pod(3, namespace="two")
        await until(lambda: found.states() == {2: "joining", 3: "joining"})
        assert {path for path, _ in found.cluster.asked} == {"/api/v1/pods"}


async def test_unready_pod_is_awaited_and_a_formerly_ready_one_stays(
    discover: Discover,
) -> None:
    async with discover() as found:
        await found.engine(2)
        for lacking in ({"ready": False}, {"phase": "Pending"}):
            found.pod(2, **lacking)
        found.pod(3, ready=True)  # what is told is told in order
        await until(lambda: 3 in found.states())
        assert 2 not in found.states()
        found.pod(2)
        await until(lambda: found.states().get(2) == "ready")
        found.pod(2, ready=False)
        found.pod(4)
        await until(lambda: 4 in found.states())
        assert found.states()[2] == "ready"


async def test_terminating_pod_drains(
    discover: Discover,
) -> None:
    async with discover() as found:
        slow = await found.engine(2)
        await found.engine(3)
        slow.pieces = (b"piece ",) * 60
        pod = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        async with found.running.client.stream("POST", "/stream") as answer:
            found.pod(3)
            await until(lambda: found.states().get(3) == "ready")
            found.cluster.terminate(pod)
            await until(lambda: found.states() == {2: "draining", 3: "ready"})
            assert await asked(found) == {"127.0.0.3"}
            assert await answer.aread() == b"piece " * 60
        await until(lambda: found.states() == {3: "ready"})
        found.cluster.delete(pod)
        found.pod(4)
        await until(lambda: found.states() == {3: "ready", 4: "joining"})


async def test_a_draining_worker_whose_pod_changes_again_leaves_once(discover: Discover) -> None:
    async with discover() as found:
        (await found.engine(2)).pieces = (b"piece ",) * 40
        pod = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        async with found.running.client.stream("POST", "/stream") as answer:
            for _ in range(3):
                found.cluster.terminate(pod)
            await until(lambda: found.states() == {2: "draining"})
            await answer.aread()
        await until(lambda: found.states() == {})


@pytest.mark.parametrize("ending", ["deleted", "failed", "succeeded", "other labels"])
async def test_a_pod_that_is_no_more_is_no_worker(discover: Discover, ending: str) -> None:
    async with discover() as found:
        await found.engine(2)
        pod = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        if ending == "deleted":
            found.cluster.delete(pod)
        elif ending == "other labels":
            found.pod(2, labels={"app": "else"})
        else:
            found.pod(2, phase=ending.capitalize(), ready=False)
        await until(lambda: found.states() == {})
        assert (await found.running.client.post("/ask")).status_code == 503


async def test_the_address_of_an_ended_pod_goes_to_the_next(discover: Discover) -> None:
    """Its own end may be told after the other's beginning: an evicted pod keeps its address in its status."""
    async with discover() as found:
        await found.engine(2)
        old = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        found.pod(2, phase="Failed", ready=False)
        young = found.cluster.put(old | {"metadata": old["metadata"] | {"name": "young", "uid": "young"}})
        await until(
            lambda: (
                [worker.labels["kubernetes_pod"] for worker in found.running.router.pool] == ["default/young"]
            )
        )
        found.cluster.delete(old)
        found.pod(3)
        await until(lambda: 3 in found.states())
        assert found.states()[2] == "ready"
        found.cluster.delete(young)
        await until(lambda: found.states() == {3: "joining"})


async def test_two_pods_at_one_address_are_one_worker_after_the_other(
    discover: Discover, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a node's own network; or when an address goes to the next pod before the end of the last is told."""
    caplog.set_level(logging.INFO)
    async with discover() as found:
        await found.engine(2)
        first = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        for name in ("gone", "second", "third"):
            found.cluster.put(first | {"metadata": first["metadata"] | {"name": name, "uid": name}})
        await until(lambda: caplog.text.count("which is a worker already") == 3)
        names = [worker.labels["kubernetes_pod"] for worker in found.running.router.pool]
        assert names == ["default/p-2"]
        found.cluster.delete(first | {"metadata": first["metadata"] | {"name": "gone"}})
        found.cluster.terminate(first)
        await until(
            lambda: (
                [worker.labels["kubernetes_pod"] for worker in found.running.router.pool]
                == ["default/second"]
            )
        )
        await until(lambda: found.states() == {2: "ready"})
        found.cluster.delete(first)
        found.cluster.forget()
        found.cluster.cut()  # also those that wait are listed again
        await until(lambda: len(list(found.cluster.lists())) == 2)
        found.cluster.delete(first | {"metadata": first["metadata"] | {"name": "second"}})
        await until(
            lambda: (
                [worker.labels["kubernetes_pod"] for worker in found.running.router.pool] == ["default/third"]
            )
        )


async def test_a_pod_that_gets_another_address_moves_there(discover: Discover) -> None:
    """As when its node was started again."""
    async with discover() as found:
        await found.engine(2)
        await found.engine(3)
        pod = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        found.pod(2, ready=False)
        found.cluster.put(pod | {"status": pod["status"] | {"podIP": "127.0.0.3"}})
        await until(lambda: found.states() == {3: "ready"})


@pytest.fixture
async def pods() -> AsyncIterator[tuple[PodWorkers, WorkerPool]]:
    """The pods' receiver, and the workers that pods become."""
    async with routing({}) as running:
        yield PodWorkers(running.router, 80, "regular", {}, ()), running.router.pool


SERVING = Pod("u", "default/p", LABELS, "127.0.0.2", "serving", None)


async def test_a_pod_that_leaves_before_it_could_join_does_not_join(
    pods: tuple[PodWorkers, WorkerPool],
) -> None:
    told, workers = pods
    endings: list[Callable[[], None]] = [
        lambda: told.update(replace(SERVING, state="leaving")),
        lambda: told.update(replace(SERVING, state="ended")),
        lambda: told.remove("u"),
        lambda: told.replace_all([]),
    ]
    for end in endings:
        told.update(SERVING)
        end()
        await anyio.sleep(0.02)
        assert len(workers) == 0
    told.update(SERVING)
    await until(lambda: len(workers) == 1)


async def test_a_pod_that_ends_while_it_waits_for_an_address_waits_no_longer(
    pods: tuple[PodWorkers, WorkerPool],
) -> None:
    told, workers = pods
    endings: list[Callable[[], None]] = [lambda: told.remove("w"), lambda: told.replace_all([SERVING])]
    for end in endings:
        told.update(SERVING)
        await until(lambda: len(workers) == 1)
        told.update(replace(SERVING, uid="w"))
        await anyio.sleep(0.02)
        end()
        told.remove("u")
        told.retry_waiting()
        await anyio.sleep(0.02)
        assert len(workers) == 0


@pytest.mark.parametrize("is_removed", [True, False])
async def test_pod_waits_until_no_passthrough_worker_is_there(
    discover: Discover, caplog: pytest.LogCaptureFixture, is_removed: bool
) -> None:
    async with discover() as found:
        for last in (2, 3):
            await found.engine(last)
        client, other = found.running.client, {"url": found.url(3)}
        await client.post("/workers", json=other | {"worker_type": "passthrough"})
        found.pod(2)
        await until(lambda: "pod default/p-2 is no worker yet" in caplog.text)
        assert found.states() == {3: "ready"}
        if is_removed:
            await client.delete(f"/workers/{found.url(3)}")
        else:
            await client.post("/workers", json=other | {"worker_type": "regular"})
        await until(lambda: found.states() == {2: "ready"} | ({} if is_removed else {3: "ready"}))


# prefill and decode


async def test_pods_that_prefill_and_pods_that_decode(
    serve_cluster: Callable[..., AbstractAsyncContextManager[str]],
    cluster: Cluster,
    account: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = {"app": "engine", "role": "prefill"}, {"app": "engine"}
    port = {"sglang.ai/bootstrap-port": "8998"}

    def put(last: int, labels: dict[str, str], annotations: dict[str, str]) -> dict[str, Any]:
        return cluster.put(a_pod(f"p-{last}", f"127.0.0.{last}", labels=labels, annotations=annotations))

    async with serve_cluster() as url:
        settings = Settings(
            url, pairs=True, prefill_selector=prefill, decode_selector=decode, account=account
        )
        async with routing({"kubernetes": Discovery(settings)}) as running:
            pool = running.router.pool

            def known() -> dict[str, tuple[str, int | None]]:
                return {worker.url[-1]: (worker.worker_type, bootstrap_port(worker)) for worker in pool}

            first = put(2, prefill, port)  # it fits both
            put(3, prefill, {})
            put(4, prefill, {"sglang.ai/bootstrap-port": "none"})
            put(5, decode, port)
            await until(lambda: len(pool) == 4)
            assert known() == {
                "2": ("prefill", 8998), "3": ("prefill", None), "4": ("prefill", None), "5": ("decode", None),
            }  # fmt: skip
            assert "pod default/p-4: sglang.ai/bootstrap-port is no port: 'none'" in caplog.text
            put(3, decode, {})  # it changes its role
            await until(lambda: known().get("3") == ("decode", None))
            cluster.delete(first)
            await until(lambda: sorted(known()) == ["3", "4", "5"])


def test_with_prefill_and_decode_their_selectors_count(account: Path) -> None:
    given = options("--prefill-selector", "a=b", "--selector", "x=y", "--service-account-dir", str(account))
    given.pd_disaggregation = True
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    settings = Settings.from_options(given, environment)
    assert settings.selectors == {"prefill": {"a": "b"}}
    assert settings.server == "https://10.0.0.1:443"
    given.prefill_selector = {}
    with pytest.raises(SettingsError, match="--prefill-selector or --decode-selector"):
        Settings.from_options(given, environment)


# the workers of others


async def test_workers_registered_by_others_are_not_touched(discover: Discover, pods_port: int) -> None:
    async with discover("--worker-urls", f"http://127.0.0.2:{pods_port}") as found:
        await found.engine(2)
        await found.engine(3)
        await found.running.client.post("/workers", json={"url": found.url(3), "labels": {"rack": "7"}})
        pods = [found.pod(last) for last in (2, 3, 4)]
        await until(lambda: found.states() == {2: "ready", 3: "ready", 4: "joining"})
        for pod in pods:
            found.cluster.terminate(pod)
        await until(lambda: 4 not in found.states())
        for pod in pods:
            found.cluster.delete(pod)
        found.pod(5)
        await until(lambda: 5 in found.states())
        assert found.states() == {2: "ready", 3: "ready", 5: "joining"}


async def test_a_worker_that_is_registered_anew_is_no_longer_the_pods(discover: Discover) -> None:
    async with discover() as found:
        await found.engine(2)
        pod = found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        await found.running.client.post("/workers", json={"url": found.url(2)})
        found.cluster.delete(pod)
        found.pod(3)
        await until(lambda: 3 in found.states())
        assert found.states()[2] == "ready"


async def test_a_pod_whose_worker_was_removed_stays_away(discover: Discover) -> None:
    async with discover() as found:
        await found.engine(2)
        found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        (worker,) = found.running.router.pool
        await found.running.client.delete(f"/workers/{worker.id}")
        found.pod(2, annotations={"changed": "yes"})
        found.cluster.forget()
        found.cluster.cut()  # it is listed again, too
        found.pod(3)
        await until(lambda: found.states() == {3: "joining"})
        assert len(list(found.cluster.lists())) == 2


# who may be a worker


async def test_a_pod_at_an_address_that_no_worker_may_have_is_none(
    discover: Discover, caplog: pytest.LogCaptureFixture
) -> None:
    async with discover("--allow-worker", "127.0.0.3") as found:
        with caplog.at_level(logging.WARNING):
            found.pod(2)
            found.pod(2, annotations={"changed": "yes"})
            found.pod(3)
            await until(lambda: found.states() == {3: "joining"})
    assert caplog.text.count("pod default/p-2 is no worker") == 1
    assert f"{found.url(2)} is not among the workers that --allow-worker names" in caplog.text


async def test_a_pod_that_claims_where_clouds_keep_credentials_is_none(
    discover: Discover, caplog: pytest.LogCaptureFixture
) -> None:
    async with discover() as found:
        found.cluster.put(a_pod("odd", "169.254.169.254", labels=LABELS))
        found.cluster.put(a_pod("odder", "nonsense!", labels=LABELS))
        found.pod(3)
        await until(lambda: found.states() == {3: "joining"})
    assert "pod default/odd is no worker" in caplog.text
    assert "pod default/odder is no worker" in caplog.text


async def test_the_routers_own_pod_is_no_worker(
    discover: Discover, pods_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with discover("--host", "127.0.0.2", "--port", str(pods_port)) as found:
        found.pod(2)
        found.pod(3)
        await until(lambda: found.states() == {3: "joining"})
    assert f"pod default/p-2 is no worker: worker {found.url(2)} is this router itself" in caplog.text


async def test_pods_get_the_key_of_workers(discover: Discover) -> None:
    async with discover("--worker-api-key", "secret") as found:
        engine = await found.engine(2)
        found.pod(2)
        await until(lambda: found.states() == {2: "ready"})
        await asked(found, 1)
        assert engine.requests[0][1]["authorization"] == "Bearer secret"


# with state


async def test_after_a_restart_each_pod_is_the_worker_that_it_was(
    discover: Discover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when other plugins keep the start waiting before ``state``, which is entered last."""
    (tmp_path / "slow.py").write_text(
        "from contextlib import asynccontextmanager\n"
        "import anyio\n"
        "from router_core import hookimpl\n"
        "@hookimpl\n"
        "@asynccontextmanager\n"
        "async def lifespan(router):\n"
        "    await anyio.sleep(0.4)\n"
        "    yield\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    state = ("--plugin", "state", "--state-dir", str(tmp_path / "state"), "--middleware-paths", "slow")
    async with discover(*state) as found:
        for last in (2, 3):
            await found.engine(last)
        gone = found.pod(2)
        found.pod(3)
        found.pod(5)
        await until(lambda: found.states() == {2: "ready", 3: "ready", 5: "joining"})
        before = {worker.url: worker.id for worker in found.running.router.pool}
        stale(found.running.router.pool, found.running.router.pool.find(found.url(3)), "it failed an update")
    found.cluster.delete(gone)
    async with discover(*state) as found:
        found.pod(4)
        await until(lambda: 4 in found.states())
        assert found.states() == {3: "stale", 4: "joining", 5: "joining"}
        pool = found.running.router.pool
        old = pool.find(found.url(3))
        assert (old.id, old.reason) == (before[old.url], "it failed an update")
        await found.running.client.delete(f"/workers/{old.id}")
        found.pod(3, annotations={"changed": "yes"})
        found.pod(6)
        await until(lambda: 6 in found.states())
        assert 3 not in found.states(), "who was removed stays away"


# flags


def options(*words: str) -> argparse.Namespace:
    router, _ = build(words)
    return router.options


def test_without_the_flag_nothing_happens() -> None:
    router, _ = build(["--selector", "app=engine"])
    assert make_plugin(router.options) is None
    named = [*router.hooks.pre_request, *router.hooks.post_response, *router.hooks.sender]
    assert "kubernetes" not in {name for name, _ in named}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "wanted the labels of worker pods, by --selector"),
        ("--selector app", "wanted key=value, got 'app'"),
        ("--selector app=a,b=c", "wanted key=value, got 'app=a,b=c'"),
        ("--selector a=b --service-discovery-port 0", "wanted 1 to 65535, got 0"),
        ("--selector a=b --service-discovery-namespace ../nodes", "wanted a DNS label"),
        ("--selector a=b --service-account-dir /nowhere", "no /nowhere/token: run in a pod"),
    ],
)
def test_unusable_flags_end_the_start(
    words: str, said: str, account: Path, in_a_pod: Callable[[str], None]
) -> None:
    in_a_pod("https://127.0.0.1:1")
    with pytest.raises(SettingsError) as refused:
        build(["--service-discovery", "--service-account-dir", str(account), *words.split()])
    assert said in str(refused.value)


def test_outside_a_cluster_the_start_ends(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST"):
        build(["--service-discovery", "--selector", "a=b", "--service-account-dir", str(account)])


def test_labels_may_be_one_quoted_word_and_have_empty_values() -> None:
    assert options("--selector", "app=engine tier=", "--worker-urls").selector == {
        "app": "engine",
        "tier": "",
    }


def test_the_api_of_a_cluster_with_ipv6_is_found(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    given = options("--selector", "a=b", "--service-account-dir", str(account))
    assert Settings.from_options(given, environment).server == "https://[fd00::1]:6443"
