"""The demo's result, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_demo.verdict import Difference, Verdict

__all__ = ["as_dict", "show"]

Piece = Callable[[int], str]

#: Tokens of the example that are shown.
_SHOWN = 6


def as_dict(verdict: Verdict, stats: dict[str, Any], seconds: float, piece: Piece) -> dict[str, Any]:
    """Return the result as plain data."""
    example = verdict.example
    return {
        "trajectories": verdict.trajectories,
        "exact": verdict.exact,
        "turns": verdict.turns,
        "tokens": verdict.tokens,
        "trained_tokens": verdict.trained_tokens,
        "sampled_tokens_by_version": dict(sorted(verdict.tokens_by_version.items())),
        "tokens_tokenised": stats["tokens_encoded"],
        "tokens_tokenised_without_cache": verdict.naive_tokens,
        "cache_hits_per_turn": stats["per_turn"],
        "corrupted_by_tokenising_again": verdict.corrupted,
        "corrupted_after_turn": {str(turn): count for turn, count in verdict.corrupted_by_turn.items()},
        "example": None if example is None else _example(example, piece),
        "wrong": verdict.wrong,
        "seconds": round(seconds, 2),
    }


def _example(example: Difference, piece: Piece) -> dict[str, Any]:
    return {
        "session": example.session,
        "position": example.position,
        "sampled": [[token, piece(token)] for token in example.sampled[:_SHOWN]],
        "tokenised_again": [[token, piece(token)] for token in example.retokenised[:_SHOWN]],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print ``result``, as :func:`as_dict` made it."""
    table = Table(title="Text in, exact tokens out", show_header=False, title_style="bold", min_width=64)
    table.add_column()
    table.add_column(justify="right")
    total, exact = result["trajectories"], result["exact"]
    table.add_row("trajectories", f"{total:,}")
    table.add_row("turns", f"{result['turns']:,}")
    table.add_row("tokens (trained on)", f"{result['tokens']:,} ({result['trained_tokens']:,})")
    for version, count in result["sampled_tokens_by_version"].items():
        table.add_row(f"  sampled under weights {version}", f"{count:,}")
    table.add_row(
        "exact: equal to the engines' journals",
        Text(f"{exact:,} of {total:,}", style="bold green" if exact == total else "bold red"),
    )
    table.add_section()
    for turn, counts in result["cache_hits_per_turn"].items():
        table.add_row(
            f"cache hits, turn {turn}",
            f"{counts['hits']:,} of {counts['requests']:,} ({counts['hit_rate']:.0%})",
        )
    with_cache, without = result["tokens_tokenised"], result["tokens_tokenised_without_cache"]
    table.add_row("tokens tokenised", f"{with_cache:,}")
    table.add_row("  without the cache", f"{without:,} ({without / max(with_cache, 1):.1f} ×)")
    table.add_section()
    table.add_row(
        "tokenising the text again would have corrupted",
        f"{result['corrupted_by_tokenising_again']:,} of {total:,}",
    )
    for turn, count in result["corrupted_after_turn"].items():
        table.add_row(f"  after turn {turn}", f"{count:,} of {total:,}")
    table.add_row("time", f"{result['seconds']:.1f} s")
    console.print(table)
    if result["example"] is not None:
        console.print(_example_table(result["example"]))
    for session, reason in result["wrong"].items():
        console.print(f"[bold red]{session}[/]: {reason}")


def _example_table(example: dict[str, Any]) -> Table:
    table = Table(
        title=f"For example {example['session']}, from token {example['position']} on",
        title_style="bold",
        min_width=64,
    )
    table.add_column("the engine sampled")
    table.add_column("the text, tokenised again")
    for place in range(_SHOWN):
        table.add_row(*(_cell(example[side], place) for side in ("sampled", "tokenised_again")))
    return table


def _cell(tokens: list[tuple[int, str]], place: int) -> Text:
    if place >= len(tokens):
        return Text("")
    token, piece = tokens[place]
    return Text(f"{token:>6}  {piece!r}")
