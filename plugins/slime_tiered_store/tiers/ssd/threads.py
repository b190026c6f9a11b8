"""Threads that all start at once, so that no later call can be refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["StartedThreads"]

logger = logging.getLogger(__name__)


class StartedThreads:
    """``count`` threads, which begin calls in the order of :meth:`submit`.

    The constructor raises RuntimeError if the system refuses a thread. A process that ends without :meth:`close` does
    not wait for calls. ``ThreadPoolExecutor`` would wait for them, and it starts threads only in ``submit``: if the
    system then refuses a thread, ``submit`` raises, but leaves the call in the queue. The call would run later, on
    memory that its caller then uses for something else.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread, soon. Raises RuntimeError after :meth:`close`."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the threads have ended")
            self._calls.put(call)

    def close(self) -> None:
        """Run the calls in the queue, and end the threads. Blocks the caller."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # a bug in the call must not end the thread
                logger.exception("a thread of the SSD tier failed")
            del call  # it refers to the memory of its caller
