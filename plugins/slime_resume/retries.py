"""Retries of an aborted generation: their conditions, waits and number."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from operator import not_

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_fixed

from slime_resume.interruptions import Interruptions, Watch

__all__ = ["NoUse", "Retries"]

logger = logging.getLogger(__name__)


class NoUse(Exception):
    """A retry will not help: a client wanted the abort, or a worker refuses the request."""


class Retries:
    """``count`` times, ``wait_s`` before each, as far as ``interruptions`` know nothing better."""

    def __init__(self, count: int, wait_s: float, interruptions: Interruptions) -> None:
        self._count = count
        self._wait_s = wait_s
        self._interruptions = interruptions

    async def run(self, watch: Watch, attempt: Callable[[], Awaitable[bool]], *, at_once: bool) -> bool:
        """Repeat ``attempt`` until it returns True; False: in vain, or not wanted.

        ``at_once``: the first time without waiting, unless the engines are paused.
        """

        async def wait(wait_s: float) -> None:
            await self._interruptions.wait(watch, wait_s)

        async def wanted() -> bool:
            if self._interruptions.was_asked(watch):
                raise NoUse
            return await attempt()

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._count),
            wait=wait_fixed(self._wait_s),
            retry=retry_if_result(not_),
            retry_error_callback=_in_vain,
            sleep=wait,
        )
        await wait(0 if at_once else self._wait_s)
        try:
            return await retrying(wanted)
        except NoUse:
            return False


def _in_vain(state: RetryCallState) -> bool:
    logger.warning(
        "a generation was aborted %d times in a row; its last answer stands", state.attempt_number + 1
    )
    return False
