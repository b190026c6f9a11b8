"""The known pods are right again after whatever happens to the API, or on the way there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import orjson
import pytest
import trustme

from kubernetes_.cluster import Cluster, Pod, a_pod
from kubernetes_.conftest import LABELS, Discover
from plugged import until
from router_core.cli import build
from routers import Start
from slime_http.serving import serving
from slime_kubernetes import Pod as Seen
from slime_kubernetes import Settings, api, reflector
from slime_kubernetes.api import Api
from slime_kubernetes.reflector import Reflector

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once: these tests are about what is known afterwards."""
    monkeypatch.setattr(reflector, "_FIRST_PAUSE_S", 0.01)


ServeCluster = Callable[..., AbstractAsyncContextManager[str]]


class Known:
    """The pods that a reflector has told of, by name."""

    def __init__(self) -> None:
        self._pods: dict[str, Seen] = {}
        self.lists = 0

    @property
    def names(self) -> list[str]:
        return sorted(pod.name.partition("/")[2] for pod in self._pods.values())

    def replace_all(self, pods: Sequence[Seen]) -> None:
        self.lists += 1
        self._pods = {pod.uid: pod for pod in pods}

    def update(self, pod: Seen) -> None:
        self._pods[pod.uid] = pod

    def remove(self, uid: str) -> None:
        self._pods.pop(uid, None)


@pytest.fixture
async def known(cluster: Cluster, serve_cluster: ServeCluster, account: Path) -> AsyncIterator[Known]:
    """The pods that a watching reflector of ``cluster`` knows."""
    async with serve_cluster() as url, reflecting(url, account) as known:
        await until(lambda: len(cluster.watchers) == 1)
        yield known


@asynccontextmanager
async def reflecting(url: str, account: Path) -> AsyncIterator[Known]:
    known = Known()
    settings = Settings(url, selector=LABELS, account=account)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Reflector(Api(settings, LABELS), known, "pods").run)
        yield known
        tasks.cancel_scope.cancel()


def pod(cluster: Cluster, name: str, **annotations: str) -> Pod:
    return cluster.put(a_pod(name, "10.0.0.7", labels=LABELS, annotations=annotations))


async def follows(cluster: Cluster, known: Known, name: str = "late") -> None:
    """``known`` hears of what happens now."""
    pod(cluster, name)
    await until(lambda: name in known.names)


async def test_many_pods_come_in_pages(cluster: Cluster, serve_cluster: ServeCluster, account: Path) -> None:
    names = [f"p-{number:03}" for number in range(250)]
    for name in names:
        pod(cluster, name)
    async with serve_cluster() as url, reflecting(url, account) as known:
        await until(lambda: known.lists == 1)
        assert known.names == names
        assert [query["limit"] for query in cluster.lists()] == ["100"] * 3


async def test_a_page_that_comes_too_late_begins_the_list_anew(
    cluster: Cluster, serve_cluster: ServeCluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a list is never taken for all there is."""
    for number in range(150):
        pod(cluster, f"p-{number:03}")
    listed = cluster._list

    def forgetful(*arguments: object) -> object:
        answer = listed(*arguments)  # type: ignore[arg-type]
        if len(list(cluster.lists())) == 1:
            cluster.forget()
        return answer

    monkeypatch.setattr(cluster, "_list", forgetful)
    async with serve_cluster() as url, reflecting(url, account) as known:
        await until(lambda: known.lists == 1)
        assert len(known.names) == 150
        assert [sorted(query) for query in cluster.lists()][1:3] == [
            ["continue", "labelSelector", "limit"],
            ["labelSelector", "limit"],
        ]


async def test_a_watch_that_ends_goes_on_where_it_ended(cluster: Cluster, known: Known) -> None:
    await follows(cluster, known, "first")
    cluster.cut()
    await until(lambda: not cluster.watchers)
    pod(cluster, "meanwhile")
    await follows(cluster, known)
    assert known.names == ["first", "late", "meanwhile"]
    assert known.lists == 1


async def test_a_bookmark_tells_where_to_go_on(cluster: Cluster, known: Known) -> None:
    """Though it was long ago that one of these pods changed."""
    for number in range(10):
        cluster.put(a_pod(f"other-{number}", None, labels={"app": "else"}))
    cluster.forget()
    cluster.bookmark()
    cluster.cut()
    await follows(cluster, known)
    assert known.lists == 1


async def test_events_missed_for_too_long_cause_a_new_list(cluster: Cluster, known: Known) -> None:
    gone = pod(cluster, "gone")
    await until(lambda: known.names == ["gone"])
    cluster.cut()
    await until(lambda: not cluster.watchers)
    cluster.delete(gone)
    pod(cluster, "new")
    cluster.forget()
    await until(lambda: known.names == ["new"])
    assert known.lists == 2
    await follows(cluster, known)


async def test_a_watch_that_lags_behind_while_it_is_open_is_no_trouble(
    cluster: Cluster, known: Known, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    with caplog.at_level(logging.INFO, "slime_kubernetes"):
        cluster.say(orjson.dumps({"type": "ERROR", "object": gone}) + b"\n")
        await until(lambda: known.lists == 2)
        await follows(cluster, known)
    assert caplog.messages == []


async def test_events_are_read_however_they_are_cut(cluster: Cluster, known: Known) -> None:
    """Also with what Python takes for the end of a line and JSON does not."""
    cluster.put(a_pod("a", "10.0.0.7", labels=LABELS, annotations={"note": "one\u2028two\x85three"}))
    (watcher,) = cluster.watchers
    added = [a_pod(name, "10.0.0.8", labels=LABELS) for name in ("b", "c")]
    for number, document in enumerate(added):
        document["metadata"] |= {"uid": f"u{number}", "resourceVersion": str(cluster.version)}
    lines = b"".join(orjson.dumps({"type": "ADDED", "object": document}) + b"\n" for document in added)
    for piece in (lines[:7], lines[7 : len(lines) - 3], lines[len(lines) - 3 :]):
        watcher.events.put_nowait(piece)
        await anyio.sleep(0.02)  # so that it is read by itself
    await until(lambda: known.names == ["a", "b", "c"])
    assert known.lists == 1


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"<html>\n",
            b"[]\n",
            b"5\n",
            b'{"type": "ADDED", "object": {}}\n',
            b'{"type": "ADDED", "object": null}\n',
        ),
        *(b'{"type": "ERROR", "object": null}\n', b'{"type": "ERROR", "object": {"code": [410]}}\n'),
        b'{"type": "ADDED", "object": {"metadata": {"uid": "u", "name": "n"}, "status": "Running"}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"uid": "u", "name": "n", "annotations": ["a"]}}}\n',
    ],
)
async def test_nonsense_is_followed_by_a_list(cluster: Cluster, known: Known, line: bytes) -> None:
    cluster.say(line)
    await until(lambda: known.lists == 2)
    await follows(cluster, known)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (b'"x"', "its answer is invalid (TypeError"),
        (b'{"items": [], "metadata": null}', "its answer is invalid (AttributeError"),
        (b'{"items": [], "metadata": "x"}', "its answer is invalid (AttributeError"),
        (b'{"items": [], "metadata": {"continue": "for ever"}}', "a list of more than 3 pages"),
        (b"{}" + b" " * 9000, "a page of more than 8000 bytes"),
    ],
)
async def test_a_list_that_is_none_or_has_no_end_is_asked_for_again(
    page: bytes,
    told: str,
    cluster: Cluster,
    serve_cluster: ServeCluster,
    account: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(api, "_MAX_PAGES", 3)
    monkeypatch.setattr(api, "_MAX_PAGE_BYTES", 8000)
    cluster.status, cluster.page = 200, page
    async with serve_cluster() as url, reflecting(url, account) as known:
        await until(lambda: told in caplog.text)
        cluster.status = None
        await follows(cluster, known)


async def test_an_event_without_end_is_not_kept(
    cluster: Cluster, known: Known, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "_MAX_EVENT_BYTES", 8000)
    cluster.say(b'{"type": "ADDED", "object": "' + b"x" * 9000)
    await until(lambda: "an event of more than 8000 bytes" in caplog.text)
    await until(lambda: known.lists == 2)
    await follows(cluster, known)


async def test_a_watch_without_a_sound_is_opened_anew(
    cluster: Cluster, serve_cluster: ServeCluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose connection was lost without a word: nothing that happens comes through."""
    monkeypatch.setattr(api, "_SILENCE_S", 0.3)
    async with serve_cluster() as url, reflecting(url, account) as known:
        await until(lambda: len(cluster.watchers) == 1)
        (deaf,) = cluster.watchers
        cluster.watchers.clear()
        pod(cluster, "unheard")
        await until(lambda: known.names == ["unheard"])
        assert known.lists == 1
        cluster.watchers.append(deaf)  # for its own end


async def test_a_watch_is_asked_to_end_after_minutes_not_all_at_once(cluster: Cluster, known: Known) -> None:
    limits = {int(watcher.parameters["timeoutSeconds"]) for watcher in cluster.watchers}
    for number in range(3):
        cluster.cut()
        await follows(cluster, known, f"p-{number}")
        limits |= {int(watcher.parameters["timeoutSeconds"]) for watcher in cluster.watchers}
    assert len(limits) > 1
    assert limits <= set(range(240, 481))


async def test_a_token_that_was_replaced_is_used_from_then_on(
    cluster: Cluster, known: Known, account: Path
) -> None:
    cluster.token = "another"
    (account / "token").write_text("another")
    cluster.cut()
    await follows(cluster, known)
    assert cluster.refused == 0
    assert known.lists == 1


async def test_a_token_that_comes_late_is_waited_for(
    cluster: Cluster, known: Known, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.token = "another"
    with caplog.at_level(logging.INFO, "slime_kubernetes"):
        cluster.cut()
        await until(lambda: cluster.refused > 0)
        (account / "token").unlink()  # as it is for a moment, on some file systems
        await until(lambda: "FileNotFoundError" in caplog.text)
        (account / "token").write_text("another")
        await follows(cluster, known)
    assert [message.partition(":")[2].split()[:3] for message in caplog.messages[:-1]] == [
        ["it", "answered", "401:"],
        ["FileNotFoundError:", "[Errno", "2]"],
    ]
    assert "again" in caplog.messages[-1]
    assert "another" not in caplog.text
    assert "the token" not in caplog.text


@pytest.mark.parametrize("token", [b"", b"secret\nsecret", b"secret\x00", b"secret\xff"])
async def test_a_token_that_no_header_can_carry_is_not_told(
    token: bytes, cluster: Cluster, known: Known, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (account / "token").write_bytes(token)
    cluster.cut()
    await until(lambda: f"no token in {account}" in caplog.text)
    (account / "token").write_text("the token")
    await follows(cluster, known)
    assert "secret" not in caplog.text


async def test_forbidden_call_is_logged_once_in_the_apis_words(
    cluster: Cluster, serve_cluster: ServeCluster, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.status = 403
    with caplog.at_level(logging.INFO, "slime_kubernetes"):
        async with serve_cluster() as url, reflecting(url, account) as known:
            await until(lambda: len(cluster.asked) > 2)
            cluster.status = None
            await follows(cluster, known)
    assert caplog.messages == [
        "the Kubernetes API does not report the pods; workers stay as they are:"
        " it answered 403: the server is currently unable to handle the request",
        "the Kubernetes API reports the pods again",
    ]


async def test_page_of_a_middlebox_is_quoted_as_far_as_it_is_readable(
    cluster: Cluster, known: Known, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.status, cluster.page = 502, b"<html>Bad Gateway" + b" " * 300_000
    cluster.cut()
    await until(lambda: "it answered 502: <html>Bad Gateway" in caplog.text)
    await until(lambda: "watch" not in cluster.asked[-1][1])  # then it is to be listed
    assert len(caplog.text) < 1000
    cluster.status = None
    await follows(cluster, known)


async def test_an_api_with_another_certificate_is_told_nothing(
    cluster: Cluster, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "x.pem"))
    async with (
        serving(cluster, ssl_certfile=str(tmp_path / "x.pem"), grace_s=1) as url,
        reflecting(url, account),
    ):
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
    assert (cluster.asked, cluster.refused) == ([], 0)


# with the router


async def test_an_api_that_is_away_changes_no_worker_and_is_told_of_once(
    start: Start,
    cluster: Cluster,
    serve_cluster: ServeCluster,
    account: Path,
    in_a_pod: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["--service-discovery", "--selector", "app=engine", "--service-account-dir", str(account)]
    caplog.set_level(logging.INFO, "slime_kubernetes")
    async with serve_cluster() as url:
        pass
    in_a_pod(url)
    async with start(*words) as running:  # it is not there yet
        await until(lambda: "does not report the pods" in caplog.text)
        assert (await running.client.get("/health")).status_code == 200
        async with serve_cluster(urlsplit(url).port):
            gone = pod(cluster, "gone")
            await until(lambda: len(running.router.pool) == 1)
        await anyio.sleep(0.8)
        assert len(running.router.pool) == 1
        cluster.delete(gone)
        async with serve_cluster(urlsplit(url).port):
            await until(lambda: len(running.router.pool) == 0)
            # Read before this server ends too: the router may notice that before its own end.
            said = [message.partition(";")[0] for message in caplog.messages if "Kubernetes" in message]
    away, again = "the Kubernetes API does not report the pods", "the Kubernetes API reports the pods again"
    assert said == [away, again, away, again]


async def test_a_router_that_ends_waits_for_no_watch(discover: Discover, cluster: Cluster) -> None:
    async with discover():
        await until(lambda: len(cluster.watchers) == 1)
        began = anyio.current_time()
    assert anyio.current_time() - began < 1


def test_the_flag_comes_from_the_environment_too(
    account: Path, in_a_pod: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_pod("https://127.0.0.1:1")
    monkeypatch.setenv("SLIME_ROUTER_SERVICE_DISCOVERY", "true")
    monkeypatch.setenv("SLIME_ROUTER_SELECTOR", "[app=engine, tier=gpu]")
    monkeypatch.setenv("SLIME_ROUTER_SERVICE_ACCOUNT_DIR", str(account))
    router, _ = build([])
    assert router.options.selector == {"app": "engine", "tier": "gpu"}
