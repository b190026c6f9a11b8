"""The plugin's flags, validated once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from router_core.errors import SettingsError
from slime_radix_cache.encoding import MAX_TOKENS

__all__ = ["Settings", "add_radix_cache_options"]

#: Room for a few steps of a large rollout (512 prompts x 8 samples x 8k tokens are 34M tokens).
_MAX_TOKENS = 100_000_000
_MAX_BYTES = 4 << 30
#: 1,024 prompts of a batch with 16 samples each.
_MAX_SEQUENCES = 1 << 14


def add_radix_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    flags = parser.add_argument_group("radix_cache")
    flags.add_argument(
        "--hf-checkpoint",
        default="",
        metavar="PATH",
        help="the model's tokenizer (what transformers loads); without it, the tokenizer of another plugin",
    )
    flags.add_argument(
        "--radix-tree-max-size",
        type=int,
        default=_MAX_TOKENS,
        metavar="TOKENS",
        help=f"tokens of trajectories to keep, 0 for no limit (default {_MAX_TOKENS:,})",
    )
    flags.add_argument(
        "--radix-tree-max-bytes",
        type=int,
        default=_MAX_BYTES,
        metavar="BYTES",
        help=f"memory for trajectories, 0 for no limit (default {_MAX_BYTES:,})",
    )
    flags.add_argument(
        "--gc-threshold-k",
        type=int,
        default=5,
        metavar="K",
        help="forget what was not used within the last K weight versions, 0 for never (default 5)",
    )
    flags.add_argument(
        "--max-sequences-per-request",
        type=int,
        default=_MAX_SEQUENCES,
        metavar="N",
        help=f"prompts times n that one generation may ask for (default {_MAX_SEQUENCES:,})",
    )
    flags.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="TOKENS",
        help=f"tokens that one prompt or one text to retrieve may have (default {MAX_TOKENS:,})",
    )
    flags.add_argument(
        "--radix-add-special-tokens",
        action="store_true",
        help="let the tokenizer put its BOS before a conversation, for models that want one",
    )
    flags.add_argument(
        "--abort-retries",
        type=int,
        default=5,
        metavar="N",
        help="how often a generation from text that an engine aborted is tried again, 0 for never (default 5)",
    )
    flags.add_argument(
        "--abort-retry-wait-s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="wait before that, unless the engines are paused: then until they continue (default 30)",
    )
    flags.add_argument(
        "--resume-aborted",
        action="store_true",
        help="continue from the tokens of an aborted generation instead of sampling them anew",
    )
    flags.add_argument(
        "--trajectory-log",
        type=Path,
        metavar="DIR",
        help="log what is recorded there, and begin with what it has: then a router that is killed loses nothing",
    )
    flags.add_argument("--verbose", action="store_true", help="log a line for each turn that is recorded")


@dataclass(frozen=True, slots=True)
class Settings:
    """See the flags' help. Raises SettingsError."""

    hf_checkpoint: str
    max_tokens: int
    max_bytes: int
    gc_threshold_k: int
    max_sequences: int
    max_prompt_tokens: int
    add_special_tokens: bool
    abort_retries: int
    abort_retry_wait_s: float
    resume_aborted: bool
    trajectory_log: Path | None
    verbose: bool

    def __post_init__(self) -> None:
        for flag, value in (
            ("--radix-tree-max-size", self.max_tokens),
            ("--radix-tree-max-bytes", self.max_bytes),
            ("--gc-threshold-k", self.gc_threshold_k),
            ("--abort-retries", self.abort_retries),
            ("--abort-retry-wait-s", self.abort_retry_wait_s),
        ):
            if not value >= 0:
                raise SettingsError(f"{flag} is {value}; wanted 0 or more")
        for flag, value in (
            ("--max-sequences-per-request", self.max_sequences),
            ("--max-prompt-tokens", self.max_prompt_tokens),
        ):
            if value < 1:
                raise SettingsError(f"{flag} is {value}; wanted 1 or more")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """From the parsed command line."""
        return cls(
            hf_checkpoint=options.hf_checkpoint,
            max_tokens=options.radix_tree_max_size,
            max_bytes=options.radix_tree_max_bytes,
            gc_threshold_k=options.gc_threshold_k,
            max_sequences=options.max_sequences_per_request,
            max_prompt_tokens=options.max_prompt_tokens,
            add_special_tokens=options.radix_add_special_tokens,
            abort_retries=options.abort_retries,
            abort_retry_wait_s=options.abort_retry_wait_s,
            resume_aborted=options.resume_aborted,
            trajectory_log=options.trajectory_log,
            verbose=options.verbose,
        )
