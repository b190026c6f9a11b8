"""Ctrl-C while an event loop runs."""

from __future__ import annotations

import asyncio
import signal

from slime_start.interrupts import end_now

__all__ = ["cancel_once"]


def cancel_once() -> None:
    """Let SIGINT cancel the running task, and a second SIGINT end the process at once. Call this in the main thread.

    By default the second one raises KeyboardInterrupt anywhere, amid the clean-up of the first one.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, end_now)
        if task is not None:
            task.cancel()

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a command in the background
        loop.add_signal_handler(signal.SIGINT, cancel)
