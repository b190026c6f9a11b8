"""The files of ``--trajectory-log``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router_core.types import Tokenizer
from slime_journal.fingerprint import fingerprint
from slime_journal.record_files import LogDirectory
from slime_journal.record_log import RecordLog
from slime_radix_cache.index.losses import Losses, Marks, opened
from slime_radix_cache.index.text_search import Around, Cut
from slime_radix_cache.index.trajectories import Limits
from slime_radix_cache.journal.log_records import TRAJECTORIES
from slime_radix_cache.journal.logged_trajectories import LoggedTrajectories
from slime_radix_cache.journal.unfinished import SessionFile, UnansweredSessions, UnfinishedStreams

__all__ = ["TrajectoryLog"]


@dataclass(frozen=True, slots=True)
class TrajectoryLog:
    """Logged ``trajectories``, and ``unfinished``: the sessions of running streams."""

    directory: LogDirectory
    trajectories: LoggedTrajectories
    unfinished: UnfinishedStreams

    @classmethod
    def open(
        cls, path: Path, tokenizer: Tokenizer, limits: Limits, cut: Cut, around: Around
    ) -> TrajectoryLog:
        """Open the files in the directory ``path``, or create them. Raises StartupError."""
        directory = LogDirectory(path, "--trajectory-log")
        log = RecordLog(directory, TRAJECTORIES, fingerprint(tokenizer))
        sessions, texts = (opened(directory, f"lost-{name}.marks", Marks) for name in ("sessions", "texts"))
        streams, asking = (
            opened(directory, f"{name}.marks", SessionFile)
            for name in ("running-streams", "unanswered-sessions")
        )
        unfinished = UnfinishedStreams(streams, sessions, texts)
        unanswered = UnansweredSessions(asking, sessions)
        losses = Losses(sessions, texts, asked=unanswered)
        return cls(directory, LoggedTrajectories(limits, cut, log, around, losses, unanswered), unfinished)
