"""The plugin: a pod that serves is a worker, one that leaves is drained, one that is gone is removed."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from router_core import Worker, hookimpl
from router_core.errors import BadRequest, WorkerNotFound
from router_core.router import Router
from router_core.workers import WorkerType, worker_url
from slime_kubernetes.api import Api
from slime_kubernetes.pods import BOOTSTRAP_PORT, Pod
from slime_kubernetes.reflector import Reflector
from slime_kubernetes.settings import Settings, add_options

__all__ = ["Discovery", "Undiscovered", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

#: Labels of a worker that is a pod. A worker without is none of ours.
_NAME, _UID = "kubernetes_pod", "kubernetes_uid"


def make_plugin(options: argparse.Namespace) -> Discovery | Undiscovered:
    """The plugin with the flags of the command line. Raises SettingsError."""
    if not options.service_discovery:
        return Undiscovered()
    return Discovery(Settings.from_options(options, os.environ))


class Undiscovered:
    """The plugin without ``--service-discovery``."""

    @hookimpl
    def setup(self, router: Router) -> None:
        """Nothing; but a plugin without hooks is taken for a mistake."""


class Discovery:
    """One reflector per kind of worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        router.tasks.start_soon(self._discover, router)
        yield

    async def _discover(self, router: Router) -> None:
        await router.started.wait()  # a plugin that remembers workers has them by now
        joined: dict[str, WorkerType] = {}
        taken: list[Mapping[str, str]] = []
        for kind, labels in self.settings.selectors.items():
            pods = PodWorkers(router, self.settings.port, kind, joined, tuple(taken))
            what = f"{kind} pods" if kind != "regular" else "pods"
            router.tasks.start_soon(Reflector(Api(self.settings, labels), pods, what).run)
            taken.append(labels)


class PodWorkers:
    """The workers of one kind that are pods.

    ``joined`` has the pods that were registered, of all kinds: each is once, so that one whose worker somebody removes
    stays away. A worker is ours while it has the uid of a pod among its labels; who registers it anew takes that away.
    Pods with one of the ``taken`` sets of labels are another's.
    """

    def __init__(
        self,
        router: Router,
        port: int,
        kind: WorkerType,
        joined: dict[str, WorkerType],
        taken: Sequence[Mapping[str, str]],
    ) -> None:
        self._router = router
        self._port = port
        self._kind = kind
        self._joined = joined
        self._taken = taken

    def all_are(self, pods: Sequence[Pod]) -> None:
        there = {pod.uid for pod in pods}
        ours = {worker.labels[_UID] for worker in self._router.pool if self._is_ours(worker)}
        for uid in (ours | {uid for uid, kind in self._joined.items() if kind == self._kind}) - there:
            self.is_gone(uid)
        for pod in pods:
            self.is_so(pod)

    def is_so(self, pod: Pod) -> None:
        if any(labels.items() <= pod.labels.items() for labels in self._taken):
            return
        if pod.state == "ended":
            self.is_gone(pod.uid)
        elif pod.state == "leaving":
            worker = self._worker(pod.uid)
            if worker is not None and worker.state != "draining":
                self._router.drain_worker(worker)
        elif pod.state == "serving" and self._joined.get(pod.uid) != self._kind:
            self._joined[pod.uid] = self._kind
            self._router.tasks.start_soon(self._join, pod)

    def is_gone(self, uid: str) -> None:
        if self._joined.get(uid) == self._kind:
            del self._joined[uid]
        worker = self._worker(uid)
        if worker is not None:
            self._router.pool.remove(worker)

    async def _join(self, pod: Pod) -> None:
        """Register ``pod``, unless it has ended meanwhile, or somebody else has."""
        try:
            url = worker_url(pod.url(self._port))
            self._router.settings.addresses.check(url)
        except BadRequest as error:
            logger.warning("pod %s is no worker: %s", pod.name, error)
            return
        if self._joined.get(pod.uid) == self._kind and self._makes_way(url, pod):
            await self._router.add_worker(
                url,
                worker_type=self._kind,
                bootstrap_port=self._bootstrap_port(pod),
                labels={_NAME: pod.name, _UID: pod.uid},
            )

    def _makes_way(self, url: str, pod: Pod) -> bool:
        """Whether ``pod`` may register at ``url``: the address of a pod that is no more is given to another."""
        try:
            known = self._router.pool.find(url)
        except WorkerNotFound:
            return True
        uid = known.labels.get(_UID)
        if uid == pod.uid:
            return not self._is_ours(known)  # else it was remembered
        if uid is None or uid in self._joined:
            logger.info("pod %s is at %s, which is a worker already", pod.name, url)
            return False
        self._router.pool.remove(known)
        return True

    def _is_ours(self, worker: Worker) -> bool:
        return _UID in worker.labels and worker.worker_type == self._kind

    def _worker(self, uid: str) -> Worker | None:
        return next(
            (worker for worker in self._router.pool if self._is_ours(worker) and worker.labels[_UID] == uid),
            None,
        )

    def _bootstrap_port(self, pod: Pod) -> int | None:
        said = pod.bootstrap_port
        if self._kind != "prefill" or said is None:
            return None
        if said.isdecimal() and 0 < int(said) < 65536:
            return int(said)
        logger.warning("pod %s: %s is no port: %r", pod.name, BOOTSTRAP_PORT, said[:40])
        return None
