"""A reflector of the pods with given labels: it lists them, watches them, and lists again when it missed changes."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

import anyio
import httpx

from slime_kubernetes.api import Api, Refused
from slime_kubernetes.pods import Pod

__all__ = ["PodReceiver", "Reflector"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
#: A round (a list, if one is needed, and a watch) that lasted longer than this is no failure, however it ended.
_LONG_S = 5.0


class PodReceiver(Protocol):
    """A receiver of pod changes."""

    def replace_all(self, pods: Sequence[Pod]) -> None:
        """Replace all known pods by ``pods``."""

    def update(self, pod: Pod) -> None:
        """Take ``pod``, which is new or has changed."""

    def remove(self, uid: str) -> None:
        """Drop the pod ``uid``, which has gone or lost its labels."""


class Reflector:
    """Follows the pods of ``api``, and reports changes to ``receiver``, but none while the API cannot be reached.

    ``what``: the name of the pods in log messages.
    """

    def __init__(self, api: Api, receiver: PodReceiver, what: str) -> None:
        self._api = api
        self._receiver = receiver
        self._what = what
        self._version: str | None = None
        self._trouble: str | None = None

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        while True:
            began = anyio.current_time()
            trouble = await self._round()
            failures = 0 if anyio.current_time() - began > _LONG_S else failures + 1
            if trouble is not None and failures:
                self._log(trouble)
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 16))
            await anyio.sleep(pause_s * random.uniform(0.5, 1))

    async def _round(self) -> str | None:
        """List the pods if needed, and watch them until the watch ends. Return the failure to log, or None."""
        try:
            async with self._api.session() as client:
                if self._version is None:
                    await self._list(client)
                await self._watch(client)
        except Refused as error:
            self._version = None
            return None if error.status == 410 else str(error)  # 410: the watch lagged behind, so list again
        except (httpx.HTTPError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._version = None
            return f"its answer is invalid ({type(error).__name__}: {error})"
        return None

    async def _list(self, client: httpx.AsyncClient) -> None:
        documents, version = await self._api.list(client)
        self._receiver.replace_all([Pod.of(document) for document in documents])
        self._version = version
        self._log(None)

    async def _watch(self, client: httpx.AsyncClient) -> None:
        assert self._version is not None  # narrowing: a list has set it
        async with aclosing(self._api.watch(client, self._version)) as events:
            async for kind, document in events:
                if kind == "OPEN":
                    self._log(None)
                    continue
                if kind in ("ADDED", "MODIFIED"):
                    self._receiver.update(Pod.of(document))
                elif kind == "DELETED":
                    self._receiver.remove(document["metadata"]["uid"])
                self._version = document["metadata"]["resourceVersion"]

    def _log(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble is None:
            logger.info("the Kubernetes API reports the %s again", self._what)
        else:
            logger.warning(
                "the Kubernetes API does not report the %s; workers stay as they are: %s", self._what, trouble
            )
