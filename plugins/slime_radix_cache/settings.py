"""The plugin's flags, validated once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from router_core.flags import add_flags, flag, read_flags
from slime_radix_cache.tokens.encoding import MAX_TOKENS

__all__ = ["Settings", "add_radix_cache_options"]

#: Enough for a few steps of a large rollout (512 prompts x 8 samples x 8k tokens are 34M tokens).
_MAX_TOKENS = 100_000_000
_MAX_BYTES = 4 << 30
#: Enough for a batch of 1,024 prompts with 16 samples each.
_MAX_SEQUENCES = 1 << 14


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags; each help text explains its flag."""

    hf_checkpoint: str = flag(
        "--hf-checkpoint", default="", metavar="PATH",
        help="load the tokenizer of this model; without the flag, another plugin must offer a tokenizer",
    )  # fmt: skip
    max_tokens: int = flag(
        "--radix-tree-max-size", default=_MAX_TOKENS, at_least=0, metavar="TOKENS",
        help=f"tokens of trajectories to keep, 0 for no limit (default {_MAX_TOKENS:,})",
    )  # fmt: skip
    max_bytes: int = flag(
        "--radix-tree-max-bytes", default=_MAX_BYTES, at_least=0, metavar="BYTES",
        help=f"memory for trajectories, 0 for no limit (default {_MAX_BYTES:,})",
    )  # fmt: skip
    gc_threshold_k: int = flag(
        "--gc-threshold-k", default=5, at_least=0, metavar="K",
        help="evict tokens that were not used within the last K weight versions, 0 for never",
    )  # fmt: skip
    max_sequences: int = flag(
        "--max-sequences-per-request", default=_MAX_SEQUENCES, at_least=1, metavar="N",
        help=f"sequences (prompts times n) that one request may ask for (default {_MAX_SEQUENCES:,})",
    )  # fmt: skip
    max_prompt_tokens: int = flag(
        "--max-prompt-tokens", default=MAX_TOKENS, at_least=1, metavar="TOKENS",
        help=f"tokens that one prompt or one text to retrieve may have (default {MAX_TOKENS:,})",
    )  # fmt: skip
    add_special_tokens: bool = flag(
        "--radix-add-special-tokens", default=False,
        help="let the tokenizer put its BOS before a conversation, for models that want one",
    )  # fmt: skip
    abort_retries: int = flag(
        "--abort-retries", default=5, at_least=0, metavar="N",
        help="how often to try a generation from text again after the engine aborted it, 0 for never",
    )  # fmt: skip
    abort_retry_wait_s: float = flag(
        "--abort-retry-wait-s", default=30.0, at_least=0, metavar="SECONDS",
        help="wait this long before trying again; while engines are paused, wait until they continue",
    )  # fmt: skip
    resume_aborted: bool = flag(
        "--resume-aborted", default=False,
        help="continue an aborted generation from its sampled tokens instead of sampling them again",
    )  # fmt: skip
    trajectory_log: Path | None = flag(
        "--trajectory-log", type=Path, metavar="DIR",
        help="log all recorded answers in DIR; a router that starts with DIR restores them, also after SIGKILL",
    )  # fmt: skip
    verbose: bool = flag("--verbose", default=False, help="log a line for each turn that is recorded")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        return read_flags(cls, options)


def add_radix_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_flags(parser.add_argument_group("radix_cache"), Settings)
