"""The registered workers as slime's router has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from router_core.pool import WorkerPool

__all__ = ["WorkerUrls"]


class WorkerUrls(Mapping[str, int]):
    """The requests in flight at each registered worker, by its URL, as they are at each look.

    Read-only: a worker comes by ``/add_worker`` and leaves by ``/remove_worker``.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def __getitem__(self, url: str) -> int:
        return {worker.url: worker.load for worker in self._pool}[url]

    def __iter__(self) -> Iterator[str]:
        return (worker.url for worker in self._pool)

    def __len__(self) -> int:
        return len(self._pool)

    def __repr__(self) -> str:
        return repr(dict(self))
