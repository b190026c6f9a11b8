"""What ``--trajectory-log`` costs an answer, and how fast it is read at start.

    python -m benchmarks.trajectory_log [--conversations N] [--rounds N] [--directory DIR]

Conversations of five turns and about 2,000 tokens are recorded with and without the log, in turns: processor time
of this process per answer (``record`` with ``pin`` and ``unpin``, nothing of HTTP, JSON or tokenising), and the wall
clock's, in which the write to the page cache counts in full. Then the log is read.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from benchmarks.histories import TALK, Histories, record
from router_core.record_files import LogDirectory
from router_core.record_log import RecordLog
from slime_engine.model import load_model
from slime_radix_cache.log_records import TRAJECTORIES
from slime_radix_cache.logged_trajectories import LoggedTrajectories
from slime_radix_cache.trajectories import Limits, Trajectories

_LIMITS = Limits(versions=0)


def _cut(ids: bytes, text: bytes) -> tuple[int, int]:
    return 0, 0  # no text here ends within an answer


def _opened(directory: Path) -> LoggedTrajectories:
    log = RecordLog(LogDirectory(directory, "--directory"), TRAJECTORIES, "benchmark")
    return LoggedTrajectories(_LIMITS, _cut, log)


def _filled(kept: Trajectories, histories: Histories, conversations: int) -> tuple[float, float]:
    """Microseconds per answer: of the processor, and of the clock."""
    busy = clock = 0.0
    for number in range(conversations):
        turns = histories.turns(number)
        before, begun = time.process_time(), time.perf_counter()
        record(kept, turns, f"rollout-{number:024}")
        busy += time.process_time() - before
        clock += time.perf_counter() - begun
    answers = conversations * TALK.turns / 1e6
    return busy / answers, clock / answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=2000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        load_model().tokenizer.save(directory)
        histories = Histories(Tokenizer.from_file(str(directory / "tokenizer.json")), TALK)
        without, logged, replays, size, answers = [], [], [], 0, options.conversations * TALK.turns
        for _ in range(options.rounds):
            without.append(_filled(Trajectories(_LIMITS, _cut), histories, options.conversations))
            kept = _opened(directory / "log")
            logged.append(_filled(kept, histories, options.conversations))
            size = sum(file.size_bytes for file in kept.log.files)
            kept.close()
            begun = time.perf_counter()
            again = _opened(directory / "log")
            replays.append(answers / (time.perf_counter() - begun))
            assert (again.segments, again.tokens, again.size_bytes) == (
                kept.segments,
                kept.tokens,
                kept.size_bytes,
            )
            again.close()
            del kept, again
            shutil.rmtree(directory / "log")

    def us(samples: list[tuple[float, float]]) -> dict[str, float]:
        cpu, clock = zip(*samples, strict=True)
        return {"cpu_us": statistics.median(cpu), "clock_us": statistics.median(clock)}

    figures = {
        "answers": answers,
        "without": us(without),
        "logged": us(logged),
        "bytes_per_answer": size / answers,
        "replayed_per_s": statistics.median(replays),
    }
    print(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    main()
