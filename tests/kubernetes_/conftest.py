"""A cluster that serves over TLS, pods with addresses of their own, and a router that finds them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from kubernetes_.cluster import Cluster, Pod, a_pod
from plugged import Recording
from ports import free_port
from router_core.types import ASGIApp
from routers import Start
from slime_http.serving import serving
from slime_testing import Running

LABELS = {"app": "engine"}


@dataclass
class Discovered:
    """A router with ``--service-discovery``, the cluster, and the port at which all pods listen."""

    running: Running
    cluster: Cluster
    port: int
    stack: AsyncExitStack

    async def engine(self, last: int, app: ASGIApp | None = None) -> Recording:
        """Start a server in the pod at ``127.0.0.LAST``; unless given, a stand-in with that name."""
        recording = Recording(f"127.0.0.{last}")
        await self.stack.enter_async_context(
            serving(app or recording, host=f"127.0.0.{last}", port=self.port, grace_s=1)
        )
        return recording

    def pod(self, last: int, **about: Any) -> Pod:
        """The pod ``p-LAST`` is there, or has changed; with the labels of a worker."""
        return self.cluster.put(a_pod(f"p-{last}", f"127.0.0.{last}", **{"labels": LABELS} | about))

    def url(self, last: int) -> str:
        return f"http://127.0.0.{last}:{self.port}"

    def states(self) -> dict[int, str]:
        """The workers' states, by the last number of their addresses."""
        hosts = ((urlsplit(worker.url).hostname or "", worker.state) for worker in self.running.router.pool)
        return {int(host.rpartition(".")[2]): state for host, state in hosts}


Discover = Callable[..., AbstractAsyncContextManager[Discovered]]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``ca.crt``, and ``server.pem`` for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.crt"))
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    return folder


@pytest.fixture
def account(certificates: Path, tmp_path: Path) -> Path:
    """A service account's directory; its token is the one that a cluster wants."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "ca.crt").write_bytes((certificates / "ca.crt").read_bytes())
    (folder / "token").write_text("the token\n")
    return folder


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(token="the token")


@pytest.fixture
def pods_port() -> int:
    return free_port()


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the environment say that the API is at a URL."""

    def say(url: str) -> None:
        parts = urlsplit(url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(parts.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(parts.port))

    return say


@pytest.fixture
def serve_cluster(cluster: Cluster, certificates: Path) -> Callable[..., AbstractAsyncContextManager[str]]:
    """``async with serve_cluster() as url``, at ``port`` if it is to be there again."""

    @asynccontextmanager
    async def serve(port: int = 0) -> AsyncIterator[str]:
        async with serving(cluster, port=port, ssl_certfile=str(certificates / "server.pem")) as url:
            yield url
            cluster.cut()

    return serve


@pytest.fixture
def discover(
    start: Start,
    cluster: Cluster,
    serve_cluster: Callable[..., AbstractAsyncContextManager[str]],
    in_a_pod: Callable[[str], None],
    account: Path,
    pods_port: int,
) -> Discover:
    """``async with discover("--flag", ...) as found:``, looking for pods with ``app=engine`` unless told otherwise."""

    @asynccontextmanager
    async def discovered(*flags: str, selector: str = "--selector app=engine") -> AsyncIterator[Discovered]:
        async with AsyncExitStack() as stack:
            in_a_pod(await stack.enter_async_context(serve_cluster()))
            words = ["--service-discovery", *selector.split(), "--service-discovery-port", str(pods_port)]
            words += ["--service-account-dir", str(account), "--worker-startup-check-interval", "0.05"]
            running = await stack.enter_async_context(start(*words, *flags))
            yield Discovered(running, cluster, pods_port, stack)

    return discovered
