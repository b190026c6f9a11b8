"""The registered workers in the form of slime's original router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from router_core.pool import WorkerPool

__all__ = ["WorkerUrls"]


class WorkerUrls(Mapping[str, int]):
    """A live view of the number of requests in flight at each registered worker, by URL.

    Read-only: ``/add_worker`` adds a worker, and ``/remove_worker`` removes it.
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
