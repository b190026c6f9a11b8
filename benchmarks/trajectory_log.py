"""The cost of ``--trajectory-log`` per answer, and the speed at which the log is read at start.

    python -m benchmarks.trajectory_log [--conversations N] [--rounds N] [--directory DIR]

Conversations of five turns and about 1,700 tokens are recorded with and without the log, alternately. The script
measures this process's processor time per answer, and the wall-clock time, which includes all writes to the page cache.
Then it reads the log. ``tokens``: the cost of every answer (``record`` with ``pin`` and ``unpin``, without HTTP, JSON
and tokenising). ``turns``: the additional cost of an answer to a chat, which the plugin ``openai`` keeps as a turn.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from benchmarks.histories import TALK, Histories, Turn, record, text_of
from benchmarks.options import add_directory, flags, read
from benchmarks.report import Column, Report
from slime_engine.model import load_model
from slime_journal.record_files import LogDirectory
from slime_journal.record_log import RecordLog
from slime_openai.prompts.chat_turn import Turn as ChatTurn
from slime_openai.prompts.history import History
from slime_openai.prompts.identity import next_key
from slime_openai.prompts.log_records import CHATS
from slime_openai.prompts.logged_history import LoggedHistory
from slime_openai.prompts.template_traits import STRICT
from slime_openai.requests.messages import Message
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.journal.log_records import TRAJECTORIES
from slime_radix_cache.journal.logged_trajectories import LoggedTrajectories

_LIMITS = Limits(versions=0)


class _Kept(Protocol):
    @property
    def size_bytes(self) -> int: ...


K = TypeVar("K", bound=_Kept)
_COLUMNS = (
    Column("cpu_us", "us CPU an answer", 1),
    Column("clock_us", "us", 1),
    Column("bytes_per_answer", "bytes an answer"),
    Column("replayed_per_s", "answers read a second"),
)


def _cut(ids: bytes, text: bytes) -> tuple[int, int]:
    return 0, 0  # no text here ends within an answer


def _logged_trajectories(directory: LogDirectory) -> tuple[Trajectories, RecordLog]:
    log = RecordLog(directory, TRAJECTORIES, "benchmark")
    return LoggedTrajectories(_LIMITS, _cut, log), log


def _logged_history(directory: LogDirectory) -> tuple[History, RecordLog]:
    log = RecordLog(directory, CHATS, "benchmark")
    return LoggedHistory(0, set(), log), log


def _chat(history: History, turns: Sequence[Turn], session: str) -> None:
    """Add the turns of one conversation, as the plugin ``openai`` does."""
    parent: ChatTurn | None = None
    for number, turn in enumerate(turns):
        reply = Message("assistant", turn.answer)
        place = parent.key if parent is not None else b"?"
        key = next_key(place, reply, STRICT)
        parent = ChatTurn(
            parent,
            key,
            2 * number + 2,
            "".join(session),  # each request brings its own string
            turn.prompt_ids.tobytes(),
            turn.ids.tobytes(),
            reply,
            text_of([turn]),
            "<|im_end|>",
            1,
            True,
            place,
            b"",
        )
        history.add(parent)


@dataclass
class _Side(Generic[K]):
    """One kind of store, without a log and with a log, and the function that adds a conversation to such a store."""

    plain: Callable[[], K]
    logged: Callable[[LogDirectory], tuple[K, RecordLog]]
    hold: Callable[[K, Sequence[Turn], str], None]
    samples: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {"without": [], "logged": []}
    )
    replays: list[float] = field(default_factory=list)
    size: int = 0

    def run(self, path: Path, histories: Histories, conversations: int) -> None:
        """Fill a store without a log, and another with a log. Then open the log anew, which reads it."""
        self.samples["without"].append(self._filled(self.plain(), histories, conversations))
        directory = LogDirectory(path, "--directory")
        kept, log = self.logged(directory)
        self.samples["logged"].append(self._filled(kept, histories, conversations))
        self.size = directory.as_dict()["bytes"]
        log.close()
        begun = time.perf_counter()
        again, log = self.logged(LogDirectory(path, "--directory"))
        self.replays.append(conversations * TALK.turns / (time.perf_counter() - begun))
        if again.size_bytes != kept.size_bytes:
            raise RuntimeError(
                f"{again.size_bytes} bytes were read again of {kept.size_bytes} that were kept"
            )
        log.close()
        shutil.rmtree(path)

    def _filled(self, kept: K, histories: Histories, conversations: int) -> tuple[float, float]:
        """Fill ``kept``. Returns the processor time and the wall-clock time per answer, in microseconds."""
        busy = clock = 0.0
        for number in range(conversations):
            turns = histories.turns(number)
            before, begun = time.process_time(), time.perf_counter()
            self.hold(kept, turns, f"rollout-{number:024}")
            busy += time.process_time() - before
            clock += time.perf_counter() - begun
        answers = conversations * TALK.turns / 1e6
        return busy / answers, clock / answers

    def report(self, report: Report, scenario: str, answers: int) -> None:
        """Add every sample, and the log's size and reading speed, to ``report``, and print the table."""
        for name, samples in self.samples.items():
            for cpu_us, clock_us in samples:
                report.add(scenario, name, cpu_us=cpu_us, clock_us=clock_us)
        for replayed in self.replays:
            report.add(scenario, "read again", bytes_per_answer=self.size / answers, replayed_per_s=replayed)
        report.show(scenario, _COLUMNS)


def main() -> int:
    parser = flags(__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=2000, metavar="N")
    add_directory(parser)
    given = parser.parse_args()
    options = read(given)
    conversations = options.pick(given.conversations, tiny=20)
    report = Report()
    tokens = _Side(lambda: Trajectories(_LIMITS, _cut), _logged_trajectories, record)
    turns = _Side(lambda: History(0, set()), _logged_history, _chat)
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name)
        load_model().tokenizer.save(directory)
        histories = Histories(directory / "tokenizer.json", TALK)
        for _ in range(options.rounds):
            if options.wants("tokens"):
                tokens.run(directory / "log", histories, conversations)
            if options.wants("turns"):
                turns.run(directory / "log", histories, conversations)
    answers = conversations * TALK.turns
    tokens.report(report, "tokens", answers)
    turns.report(report, "turns", answers)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
