"""Ctrl-C while an event loop runs."""

from __future__ import annotations

import asyncio
import signal

from slime_start.interrupts import end_now

__all__ = ["cancel_once"]


def cancel_once() -> None:
    """Let SIGINT cancel the running task, and a second SIGINT end the process at once. Call this in the main thread.

    By default a second SIGINT raises KeyboardInterrupt anywhere, even amid the clean-up after the first.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, end_now)
        if task is not None:
            task.cancel()

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a command in the background ignores it
        loop.add_signal_handler(signal.SIGINT, cancel)
