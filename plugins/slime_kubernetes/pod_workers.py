"""Registers serving pods as workers, and drains or removes these workers when their pods leave or end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from router_core import Worker
from router_core.errors import BadRequest, MixedWorkers, WorkerNotFound
from router_core.router import Router
from router_core.workers import WorkerType, worker_url
from slime_kubernetes.pods import PORT_ANNOTATION, Pod
from slime_sglang.facts import BOOTSTRAP_PORT

__all__ = ["UID", "Joined", "PodWorkers"]

logger = logging.getLogger(__name__)

#: Names of the labels that a worker has if it is a pod. This plugin leaves workers without ``UID`` alone.
_NAME, UID = "kubernetes_pod", "kubernetes_uid"

Joined = dict[str, tuple[WorkerType, str | None]]


class PodWorkers:
    """The workers of one kind that are pods. For the states of pods see :class:`Pod`.

    ``joined``, which all kinds share, has the kind and the address of each pod whose registration has begun. A pod is
    registered once per address, so a worker that an operator removes stays removed. ``taken``: the labels that select
    the pods of earlier kinds. A pod with all labels of one such selector is left to that kind.

    A worker belongs to the plugin while it has the label ``UID``. If somebody else registers its URL again, the worker
    loses the label.

    Addresses are reused, and a pod's end may be reported after the next pod's start. So a pod waits while the worker of
    another pod has the same URL. A pod also waits while passthrough workers are registered, since a router cannot have
    passthrough workers and other workers at once.
    """

    def __init__(
        self,
        router: Router,
        port: int,
        kind: WorkerType,
        joined: Joined,
        taken: Sequence[Mapping[str, str]],
    ) -> None:
        self._router = router
        self._port = port
        self._kind = kind
        self._joined = joined
        self._taken = taken
        self._waiting: dict[str, Pod] = {}

    def replace_all(self, pods: Sequence[Pod]) -> None:
        there = {pod.uid for pod in pods}
        ours = {worker.labels[UID] for worker in self._router.pool if self._is_ours(worker)}
        self._waiting.clear()
        for uid in (ours | {uid for uid, (kind, _) in self._joined.items() if kind == self._kind}) - there:
            self.remove(uid)
        for pod in pods:
            self.update(pod)

    def update(self, pod: Pod) -> None:
        self._waiting.pop(pod.uid, None)
        if any(labels.items() <= pod.labels.items() for labels in self._taken):
            return
        if pod.state == "ended":
            self.remove(pod.uid)
        elif pod.state == "leaving":
            self._forget(pod.uid)
            worker = self._worker(pod.uid)
            if worker is not None and worker.state != "draining":
                self._router.registration.drain(worker)
        elif pod.state == "serving" and self._joined.get(pod.uid) != (self._kind, pod.address):
            self._joined[pod.uid] = self._kind, pod.address
            self._router.tasks.start_soon(self._join, pod)

    def remove(self, uid: str) -> None:
        self._waiting.pop(uid, None)
        self._forget(uid)
        worker = self._worker(uid)
        if worker is not None:
            self._router.pool.remove(worker, "its pod has ended")

    def _forget(self, uid: str) -> None:
        if uid in self._joined and self._joined[uid][0] == self._kind:
            del self._joined[uid]

    def retry_waiting(self) -> None:
        """Try the waiting pods again, since a worker that may have been in their way was removed or has changed."""
        waiting, self._waiting = self._waiting, {}
        for pod in waiting.values():
            self.update(pod)

    async def _join(self, pod: Pod) -> None:
        """Register ``pod``, unless it has left or has another address by now, or its URL cannot become a worker now."""
        try:
            url = worker_url(pod.url(self._port))
            self._router.addresses.check(url)
        except BadRequest as error:
            logger.warning("pod %s is no worker: %s", pod.name, error)
            return
        if self._joined.get(pod.uid) != (self._kind, pod.address):
            return
        elsewhere = self._worker(pod.uid)
        if elsewhere is not None and elsewhere.url != url:
            self._router.pool.remove(elsewhere, "its pod has another address now")
        if self._is_free(url, pod):
            try:
                await self._router.add_worker(
                    url,
                    worker_type=self._kind,
                    facts={BOOTSTRAP_PORT: self._bootstrap_port(pod)},
                    labels={_NAME: pod.name, UID: pod.uid},
                )
            except MixedWorkers as error:
                logger.warning("pod %s is no worker yet: %s", pod.name, error)
                self._wait(pod)

    def _is_free(self, url: str, pod: Pod) -> bool:
        """Return True if ``pod`` may be registered at ``url`` now. Let it wait if another pod's worker has ``url``."""
        try:
            known = self._router.pool.find(url)
        except WorkerNotFound:
            return True
        uid = known.labels.get(UID)
        if uid == pod.uid:
            return not self._is_ours(known)  # False if a plugin has restored the pod's worker at the start
        logger.info("pod %s is at %s, which is a worker already", pod.name, url)
        if uid is not None:
            self._wait(pod)
        return False

    def _wait(self, pod: Pod) -> None:
        del self._joined[pod.uid]
        self._waiting[pod.uid] = pod

    def _is_ours(self, worker: Worker) -> bool:
        return UID in worker.labels and worker.worker_type == self._kind

    def _worker(self, uid: str) -> Worker | None:
        return next(
            (worker for worker in self._router.pool if self._is_ours(worker) and worker.labels[UID] == uid),
            None,
        )

    def _bootstrap_port(self, pod: Pod) -> int | None:
        said = pod.bootstrap_port
        if self._kind != "prefill" or said is None:
            return None
        if said.isdecimal() and 0 < int(said) < 65536:
            return int(said)
        logger.warning("pod %s: %s is no port: %r", pod.name, PORT_ANNOTATION, said[:40])
        return None
