"""Child processes of a benchmark: pinned to a core, measured by the kernel's clocks and /proc, and always ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "LOAD_CORE",
    "PROXY_CORE",
    "Child",
    "CoreClock",
    "child",
    "free_port",
    "leave_cleanly",
    "quick_worker",
    "require",
]

PROXY_CORE = 0
LOAD_CORE = 1

#: The kind of clock of another process (clock_getcpuclockid(3)) that counts the processor time of all its threads.
_CPU_CLOCK = 2
_ROOT = Path(__file__).resolve().parent.parent
_END_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """A running child, and its descendants: some launchers fork."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """Return the user and system time of the child and its descendants so far, in seconds."""
        return sum(time.clock_gettime(~pid << 3 | _CPU_CLOCK) for pid in self._family())

    def reset_peak_memory(self) -> None:
        """Reset the kernel's peak to the memory that is resident now (proc(5), clear_refs)."""
        for pid in self._family():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def memory_bytes(self) -> tuple[int, int]:
        """Return the resident memory of the child and its descendants: now, and the sum of peaks since the reset."""
        now = peak = 0
        for pid in self._family():
            status = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":" in line
            )
            now += int(status["VmRSS"].split()[0]) * 1024
            peak += int(status["VmHWM"].split()[0]) * 1024
        return now, peak

    def last_words(self) -> str:
        """Return the end of the child's output, for an error message."""
        return self.log.read_text(errors="replace")[-2000:].strip() or "(it said nothing)"

    def _family(self) -> list[int]:
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found


class CoreClock:
    """Measures the load of each core between two calls. This load shows which core was the limit of a run."""

    def __init__(self) -> None:
        self._before = self._read()

    def busy(self) -> dict[int, float]:
        """Return each core's share of busy time since the last call or since the start, 0 to 1. All processes count."""
        now = self._read()
        shares = {}
        for core, (idle, total) in now.items():
            idle_before, total_before = self._before[core]
            shares[core] = 1 - (idle - idle_before) / max(1, total - total_before)
        self._before = now
        return shares

    @staticmethod
    def _read() -> dict[int, tuple[int, int]]:
        cores = {}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu":
                cores[int(name[3:])] = int(ticks[3]) + int(ticks[4]), sum(map(int, ticks[:8]))
        return cores


@contextmanager
def child(name: str, command: Sequence[str], *, core: int, directory: Path) -> Iterator[Child]:
    """Run ``command`` on one core until the block ends. The child also ends when this process is killed.

    The child's output goes to a file in ``directory``. The child starts in the root of the project, so that ``-m``
    finds the packages of the source tree.
    """
    log = directory / f"{name.replace(' ', '-')}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Child(name, process, log)
    finally:
        process.terminate()
        try:
            process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require(*programs: str) -> None:
    """Exit with code 2 and a message if one of ``programs`` is missing, or if there is only one core."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        sys.exit(_explain(missing))
    if (os.cpu_count() or 1) <= LOAD_CORE:
        print(
            "benchmark: wanted two cores, one for the proxy and one for the load; found one", file=sys.stderr
        )
        sys.exit(2)


def leave_cleanly() -> None:
    """Turn SIGTERM into an orderly exit, so that every ``with`` still ends its children."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _explain(missing: Sequence[str]) -> int:
    print(
        f"benchmark: {', '.join(missing)} not found; on Debian: apt-get install wrk nginx util-linux",
        file=sys.stderr,
    )
    return 2


def _python_path() -> Iterator[str]:
    yield str(_ROOT)
    yield str(_ROOT / "plugins")
    if inherited := os.environ.get("PYTHONPATH"):
        yield inherited


@contextmanager
def quick_worker(directory: Path, answer: bytes) -> Iterator[str]:
    """Run ``benchmarks.quick_worker`` on the core of the load. It answers ``/generate`` with ``answer``.

    Yields the worker's URL. ``directory`` gets the worker's log and the files with its answers.
    """
    generated, chat = directory / "generated.json", directory / "chat.json"
    generated.write_bytes(answer)
    chat.write_bytes(b"{}")
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.quick_worker", str(port), str(generated), str(chat)]
    with child("worker", command, core=LOAD_CORE, directory=directory):
        yield f"http://127.0.0.1:{port}"
