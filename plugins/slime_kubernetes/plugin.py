"""The plugin: it registers serving pods as workers, drains workers of leaving pods, and removes those of ended pods."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from router_core import Worker, hookimpl
from router_core.flags import add_flags
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_kubernetes.api import Api
from slime_kubernetes.pod_workers import UID, Joined, PodWorkers
from slime_kubernetes.reflector import Reflector
from slime_kubernetes.settings import Settings

__all__ = ["Discovery", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Discovery | None:
    """Return the plugin; None without ``--service-discovery``. Raises SettingsError."""
    if not options.service_discovery:
        for flag in ("selector", "prefill_selector", "decode_selector"):
            if getattr(options, flag):
                logger.warning("--%s has no effect: it is for --service-discovery", flag.replace("_", "-"))
        return None
    return Discovery(Settings.from_options(options, os.environ))


class Discovery:
    """Runs a reflector for each kind of worker that has a selector."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._kinds: list[PodWorkers] = []

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        router.tasks.start_soon(self._discover, router)
        yield

    async def _discover(self, router: Router) -> None:
        await router.started.wait()  # a plugin that restores workers has restored them by now
        joined: Joined = {}
        taken: list[Mapping[str, str]] = []
        for kind, labels in self.settings.selectors.items():
            pods = PodWorkers(router, self.settings.port, kind, joined, tuple(taken))
            self._kinds.append(pods)
            what = f"{kind} pods" if kind != "regular" else "pods"
            router.tasks.start_soon(Reflector(Api(self.settings, labels), pods, what).run)
            taken.append(labels)

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        # "added" without a UID: perhaps a known worker was registered again, and no longer hinders a waiting pod.
        if change == "removed" or (change == "added" and UID not in worker.labels):
            for pods in self._kinds:
                pods.retry_waiting()
