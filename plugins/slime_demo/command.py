"""The demo command: starts router and engines, rolls out, compares, and reports."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from router_core.cli import build
from router_core.errors import SettingsError
from router_core.flags import add_flags, flag, read_flags
from router_core.types import ASGIApp
from slime_demo.conversations import FOLLOW_UPS, PROMPTS, Conversation, conversations
from slime_demo.report import as_dict, show
from slime_demo.rollouts import FIRST_VERSION, Refused, Rollouts, Sampling, checked
from slime_demo.verdict import judge
from slime_http.serving import serving
from slime_start.cancellation import cancel_once
from slime_start.commands import CommandParser
from slime_start.interrupts import INTERRUPTED

__all__ = ["main"]

_ROUTER = (
    "--plugin", "engine", "--engine-workers", "2", "--engine-weight-version", FIRST_VERSION,
    "--plugin", "radix_cache", "--log-level", "warn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Options:
    """Values of the flags."""

    json: bool = flag("--json", default=False, help="print the result as JSON")
    samples: int = flag("--samples", default=8, at_least=1, metavar="N", help="samples per prompt")
    model: str | None = flag(
        "--model", metavar="PATH",
        help="a real model instead of the tiny one: smollm2, or what the engine's --model takes",
    )  # fmt: skip
    temperature: float = flag(
        "--temperature", default=1.0, at_least=0, metavar="T", help="temperature of all turns"
    )
    max_new_tokens: int = flag(
        "--max-new-tokens", default=64, at_least=1, metavar="N",
        help="largest number of tokens sampled in each turn",
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the demo. Return 0 only if every trajectory is exact, 130 after Ctrl-C. Raises SettingsError."""
    parser = CommandParser(
        failure=SettingsError,
        prog="slime-router demo",
        description="Router, radix cache and two embedded engines on this machine: rolls out 8 prompts × 8 samples × "
        "3 turns of text, updates the weights half way, and compares every trajectory with the engines' journals.",
    )
    add_flags(parser, _Options)
    options = read_flags(_Options, parser.parse_args(list(argv)))
    real = ("--engine-backend", "transformers", "--engine-model", options.model) if options.model else ()
    try:
        _, app = build((*_ROUTER, *real))
    except SettingsError as error:
        raise SettingsError(_in_own_flags(str(error))) from None
    if not options.json:
        sys.stderr.write(f"{_about(options)}\n")  # a pipe shows no progress bar
    sampling = Sampling(options.temperature, options.max_new_tokens)
    console = Console(stderr=True, quiet=options.json)
    result: dict[str, Any] | None = None
    failure = 1
    try:
        result = anyio.run(
            _demo, app, options.samples, sampling, console, backend_options={"use_uvloop": True}
        )
    except* (Refused, httpx.HTTPError) as failed:
        sys.stderr.write(f"slime-router demo: {_first(failed)}\n")
    except* asyncio.CancelledError:
        failure = INTERRUPTED
    if result is None:
        return failure
    if options.json:
        sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        show(result, Console())
    return 0 if result["exact"] == result["trajectories"] else 1


def _about(options: _Options) -> str:
    count, turns = len(PROMPTS) * options.samples, 1 + len(FOLLOW_UPS)
    return f"a router, two engines with {options.model or 'a tiny model'}, {count} conversations of {turns} turns ..."


def _in_own_flags(message: str) -> str:
    """Return ``message`` with the demo's flag ``--model`` in the place of the engine's flags."""
    return message.replace("--engine-backend transformers", "--model").replace("--engine-model", "--model")


def _first(failed: BaseException) -> BaseException:
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed


async def _demo(app: ASGIApp, samples: int, sampling: Sampling, console: Console) -> dict[str, Any]:
    started = time.monotonic()
    cancel_once()
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S, limits=_LIMITS) as client,
    ):
        workers: list[str] = (await client.get("/list_workers")).json()["urls"]
        info = (await client.get(f"{workers[0]}/model_info")).json()
        tokenizer = Tokenizer.from_file(str(Path(info["tokenizer_path"], "tokenizer.json")))
        rolled = conversations(samples)
        await _roll_out(client, workers, rolled, sampling, info["model_path"], console)
        retrieved = {conversation.session: await _retrieve(client, conversation) for conversation in rolled}
        journal = {
            entry["rid"]: entry
            for worker in workers
            for entry in (await client.get(f"{worker}/journal")).json()["entries"]
        }
        stats = (await client.get("/cache_stats")).json()
        verdict = judge(
            rolled,
            retrieved,
            journal,
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            decode=lambda ids: str(tokenizer.decode(ids)),
        )
        seconds = time.monotonic() - started
        return as_dict(
            verdict, stats, seconds, lambda token: tokenizer.decode([token], skip_special_tokens=False)
        )


async def _roll_out(
    client: httpx.AsyncClient,
    workers: list[str],
    rolled: list[Conversation],
    sampling: Sampling,
    weights: str,
    console: Console,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("rolling out")
        rollouts = Rollouts(client, workers, rolled, sampling, weights, lambda: progress.advance(bar))
        progress.update(bar, total=rollouts.turns)
        await rollouts.run()


async def _retrieve(client: httpx.AsyncClient, conversation: Conversation) -> dict[str, Any]:
    asked = {"text": conversation.text, "session_id": conversation.session}
    found: dict[str, Any] = checked(await client.post("/retrieve_from_text", json=asked)).json()
    return found


#: A real model on a busy CPU takes minutes for a turn of all conversations.
_TIMEOUT_S = 1800
_LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=64)
