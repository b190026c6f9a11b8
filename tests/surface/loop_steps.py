"""Work that an event loop does between two of its turns, in steps that are the same on every machine, or nearly."""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns, thread_time_ns
from types import CodeType, FrameType

__all__ = ["MOST", "LoopSteps"]

#: Steps that take up to 20 ms on an ordinary core. A step is a call, of a function or of what is written in C. The
#: cheapest (``isinstance``) takes 25 ns; of the router's own work, timed without being counted, a step took 0.05 us
#: (rids, one by one), 0.1 us (messages of a chat, prompts of a completion) to 0.2 us (stop strings).
MOST = 100_000
_STEP_NS = 200
#: Processor time of this thread in which no call begins or ends, but one, written in C, goes on: to parse JSON, to pack
#: ids, to decode tokens. So long it counts as the steps that would take as long; whatever is shorter is a step.
_SILENT_NS = 2_000_000
#: Looks at the cheap clock, the one on the wall, for one at the other.
_LOOKS = 1_000

_RUN: CodeType = asyncio.events.Handle._run.__code__


class LoopSteps:
    """Counts the steps of one event loop: of each callback, which nothing else can interrupt.

    ``most`` is the number of the callback with most of them, ``calls`` that of the one with most calls, and ``where``
    the stack when one went beyond ``MOST``. They are to be read in the loop: an answer may be out before the callback
    that wrote it has ended.
    """

    def __init__(self) -> None:
        self.most = self.calls = 0
        self.where = ""
        self._steps = self._calls = 0
        self._clock = ProcessorClock()

    async def taken(self) -> tuple[int, int, str]:
        """``most``, ``calls`` and ``where`` since this was asked for the last time."""
        taken = self.most, self.calls, self.where
        self.most, self.calls, self.where = 0, 0, ""
        return taken

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the loop of this thread does.

        No garbage is collected meanwhile: the tests' would count as well. Do that in another thread.
        """
        gc.disable()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is _RUN and event == "call":
            self._steps = self._calls = 0
            self._clock.read()
            return
        before = self._steps
        is_call = event in ("call", "c_call")
        self._calls += is_call
        self._steps += self._clock.silent_ns() // _STEP_NS or is_call
        if before <= MOST < self._steps and not self.where:
            self.where = _shown(frame)
        if code is _RUN and event == "return":
            self.most = max(self.most, self._steps)
            self.calls = max(self.calls, self._calls)


class ProcessorClock:
    """Processor time between two looks. The kernel is asked for it now and then: that takes longer than a step."""

    def __init__(self) -> None:
        self._looks = 0
        self.read()

    def read(self) -> None:
        """Begin anew."""
        self._looked_ns, self._cpu_ns = perf_counter_ns(), thread_time_ns()

    def silent_ns(self) -> int:
        """Processor time since the last look; 0 when it was short."""
        now = perf_counter_ns()
        passed, self._looked_ns = now - self._looked_ns, now
        self._looks += 1
        if passed < _SILENT_NS and self._looks % _LOOKS:
            return 0
        cpu = thread_time_ns()
        spent, self._cpu_ns = min(passed, cpu - self._cpu_ns), cpu
        return spent if spent >= _SILENT_NS else 0


def _shown(frame: FrameType) -> str:
    stack = traceback.extract_stack(frame)[-9:]
    return "\n".join(f"{one.filename}:{one.lineno} {one.name}" for one in stack)
