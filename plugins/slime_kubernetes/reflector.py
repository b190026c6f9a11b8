"""Knows the pods with some labels, by one list and then by what is told of them; again from the list when need be."""

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

__all__ = ["Reflector", "Told"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
#: Seconds after which the end of a round, for whatever reason, is no failure.
_LONG_S = 5.0


class Told(Protocol):
    """A receiver of pod changes."""

    def all_are(self, pods: Sequence[Pod]) -> None:
        """These are all there are."""

    def is_so(self, pod: Pod) -> None:
        """``pod`` is new, or has changed."""

    def is_gone(self, uid: str) -> None:
        """The pod ``uid`` has gone, or has other labels."""


class Reflector:
    """Follows the pods of ``api``, and reports them to ``told``. While the API is unreachable, it reports nothing."""

    def __init__(self, api: Api, told: Told, what: str) -> None:
        self._api = api
        self._told = told
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
                self._tell(trouble)
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 16))
            await anyio.sleep(pause_s * random.uniform(0.5, 1))

    async def _round(self) -> str | None:
        """A list, if one is needed, and a watch to its end; what was wrong, if anything was."""
        try:
            async with self._api.session() as client:
                if self._version is None:
                    await self._list(client)
                await self._watch(client)
        except Refused as error:
            self._version = None
            return None if error.status == 410 else str(error)  # the watch lagged behind, that is all
        except (httpx.HTTPError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._version = None
            return f"it answered nonsense ({type(error).__name__}: {error})"
        return None

    async def _list(self, client: httpx.AsyncClient) -> None:
        documents, version = await self._api.list(client)
        self._told.all_are([Pod.of(document) for document in documents])
        self._version = version
        self._tell(None)

    async def _watch(self, client: httpx.AsyncClient) -> None:
        assert self._version is not None  # narrowing: it was listed
        async with aclosing(self._api.watch(client, self._version)) as events:
            async for kind, document in events:
                if kind == "OPEN":
                    self._tell(None)
                    continue
                if kind in ("ADDED", "MODIFIED"):
                    self._told.is_so(Pod.of(document))
                elif kind == "DELETED":
                    self._told.is_gone(document["metadata"]["uid"])
                self._version = document["metadata"]["resourceVersion"]

    def _tell(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble is None:
            logger.info("the Kubernetes API tells of the %s again", self._what)
        else:
            logger.warning(
                "the Kubernetes API does not tell of the %s, they stay as they are: %s", self._what, trouble
            )
