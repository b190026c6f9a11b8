"""Questions to a new SGLang worker about its weight version, its model, and its data-parallel ranks."""

from __future__ import annotations

import logging

import anyio

from router_core import Worker
from router_core.errors import WorkerBroke
from router_core.registration import FIRST_LOOK_S, Refusal, unwell
from router_core.router import Router
from router_core.weights import version_named
from slime_sglang.documents import document_in
from slime_sglang.facts import EXPERTS_SHAPE, TOLD_MODEL
from slime_sglang.ranks import ranks_told, split
from slime_sglang.recognizer import objection

__all__ = ["Introduction"]

logger = logging.getLogger(__name__)


class Introduction:
    """The component ``"introduction"``, see :class:`router_core.registration.Introduction`.

    ``counts_ranks``: each worker is asked how many data-parallel ranks it has. ``asks_model``: each worker is asked for
    the model that it serves.
    """

    def __init__(self, router: Router, *, counts_ranks: bool) -> None:
        self._router = router
        self._counts_ranks = counts_ranks
        self.asks_model = False

    async def ask(self, worker: Worker) -> str | None:
        """See :class:`router_core.registration.Introduction`."""
        router, get = self._router, self._router.registration.get
        served = None
        with anyio.fail_after(FIRST_LOOK_S):  # httpx's timeouts are for single steps of a request
            for path in ("/model_info", "/get_model_info"):
                status, body = await get(worker, path)
                if status != 404:
                    break
            if status < 500 and (self._counts_ranks or self.asks_model):
                told = await self._server_info(worker)
                if self._counts_ranks:
                    split(router.pool, worker, ranks_told(told))
                if self.asks_model:
                    served = _served_model(told)
        trouble = unwell(status)
        if trouble is not None:
            return trouble
        if status == 404 and (wrong := await objection(worker, router.http)) is not None:
            return Refusal(wrong)
        model_path = self._learn(worker, body) if status == 200 else None
        if served is not None or worker.facts.get(TOLD_MODEL) is None:
            # Keep the first path that the worker reported: an update from disk changes the path.
            worker.facts[TOLD_MODEL] = served or model_path
        return None

    async def count_again(self, worker: Worker) -> None:
        """Count the ranks of ``worker`` again: the worker is back, perhaps as another process with other ranks."""
        trouble: object = f"no answer within {FIRST_LOOK_S:g} s"
        with anyio.move_on_after(FIRST_LOOK_S):
            try:
                split(self._router.pool, worker, ranks_told(await self._server_info(worker)))
                return
            except Exception as error:  # of many kinds with httpcore on uvloop; it must not end the router
                trouble = error
        logger.warning("worker %s does not say how many ranks it has: %s", worker.url, trouble)

    async def _server_info(self, worker: Worker) -> bytes:
        for path in ("/server_info", "/get_server_info"):
            status, body = await self._router.registration.get(worker, path)
            if status == 200:
                return body
            if status >= 500:
                raise WorkerBroke(f"it answered {path} with {status}")
        return b""

    def _learn(self, worker: Worker, body: bytes) -> str | None:
        """Note the weight version and the shape of routed experts in ``body``. Return the path of the model."""
        info = document_in(body)
        if info is None:
            worker.said_version = None  # a worker that registered again may be another server
            return None  # not an SGLang server, but it can still be a worker
        shape = info.get("num_hidden_layers"), info.get("num_experts_per_tok")
        if all(type(size) is int and size > 0 for size in shape):
            worker.facts[EXPERTS_SHAPE] = shape
        version, model = version_named(info.get("weight_version")), info.get("model_path")
        worker.said_version = version
        if version is not None:
            self._router.pool.set_version(worker, version)
            self._router.weights.see(version)
            if self._router.weights.current is None:
                self._router.weights.move(version, worker.url)  # no hook: the version is learnt, not changed
        return model if isinstance(model, str) else None


def _served_model(server_info: bytes) -> str | None:
    """Return the server's ``served_model_name``, or None."""
    name = (document_in(server_info) or {}).get("served_model_name")
    return name if isinstance(name, str) and name else None
