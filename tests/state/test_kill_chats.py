"""SIGKILL to the router, again and again, while clients chat: each conversation stays one exact sample.

The engine is in this process, outlives the router, and spells every word as no tokenizer would; so whatever is
tokenised anew is found out. Its journal is what the answers and the samples are held against.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S
from openai_.chat_models.families import QWEN3
from openai_.chat_models.steered import by_text, speaking
from openai_.drift.clients import CLIENTS
from ports import free_port
from slime_engine.journal import JournalEntry
from state.chatting import FORK_AFTER, Clients, StatedChat, reply
from state.killed import listening, started

#: The least. More take place until there was something of every kind to be lost.
KILLS = int(os.environ.get("SLIME_ROUTER_KILLS", "2"))
MOST_KILLS = KILLS + 15
#: That clients hear between two kills, or half of it.
ANSWERS = 3 * len(CLIENTS)


def check_answers(chats: Sequence[StatedChat], journal: dict[str, JournalEntry]) -> None:
    """Each turn consisted of all tokens of the turn before, and something behind them."""
    for chat in chats:
        known: list[int] = []
        for number, heard in enumerate(chat.heard):
            entry = journal[heard.rid]
            assert (heard.prompt, heard.sampled) == (list(entry.input_ids), list(entry.output_ids))
            assert heard.history in (("exact", "restored") if number else ("fresh",)), (chat.name, number)
            assert heard.prompt[: len(known)] == known, (chat.name, number)
            known = heard.prompt + heard.sampled


async def check_samples(
    client: httpx.AsyncClient, chats: Sequence[StatedChat], journal: dict[str, JournalEntry]
) -> None:
    """Hold the samples of each session against the journal."""
    sessions: dict[str, list[StatedChat]] = {}
    for chat in chats:
        if chat.session is not None and chat.heard:
            sessions.setdefault(chat.session, []).append(chat)
    for session, branches in sessions.items():
        document = (await client.get(f"/trajectories/{session}")).json()
        check_session(document, {branch.name: branch for branch in branches}, journal)


def check_session(
    document: dict[str, Any], branches: dict[str, StatedChat], journal: dict[str, JournalEntry]
) -> None:
    """Every turn that was heard is in an exact sample, and each sample ends where its branch ended.

    Its last turn may be one of which nobody heard: it was recorded, and the router was killed.
    """
    asked = {tokens_of(entry): entry for entry in journal.values() if chat_of(entry.rid) in branches}
    leaves = {tuple(leaf["tokens"]): leaf for leaf in document["trajectories"]}
    assert len(leaves) == len(document["trajectories"])
    samples = {tokens: asked[tokens].rid for tokens in leaves}
    for tokens, rid in samples.items():
        branch = branches[chat_of(rid)]
        before = [heard.rid for heard in branch.heard[: turn_of(rid)]]
        check_sample(leaves[tokens], [journal[one] for one in (*before, rid)])
        assert not any(begins(tokens, other) for other in leaves if other != tokens), rid
    for branch in branches.values():
        for heard in branch.heard:
            assert any(begins(tokens_of(journal[heard.rid]), tokens) for tokens in leaves), heard.rid
    lost = set().union(*(branch.partly_heard for branch in branches.values())) - set(samples.values())
    assert not (lost and document["complete"]), lost
    assert document["complete"] or any(branch.streamed for branch in branches.values())


def chat_of(rid: str) -> str:
    """The name of the chat that asked."""
    return rid.split(".")[0]


def turn_of(rid: str) -> int:
    """The number of turns that its chat had heard before."""
    return int(rid.split(".")[1])


def tokens_of(entry: JournalEntry) -> tuple[int, ...]:
    """All that the engine consumed and sampled."""
    return *entry.input_ids, *entry.output_ids


def begins(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """True when ``part`` is the beginning of ``whole``."""
    return whole[: len(part)] == part


def check_sample(leaf: dict[str, Any], turns: Sequence[JournalEntry]) -> None:
    """All that was sampled in the conversation is to be trained on, and nothing else."""
    assert leaf["exact"], leaf["inexact_reason"]
    mask = [0] * len(leaf["tokens"])
    logprobs = [0.0] * len(leaf["tokens"])
    for turn in turns:
        assert begins(tokens_of(turn), tuple(leaf["tokens"])), turn.rid
        place = slice(len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids))
        mask[place] = [1] * len(turn.output_ids)
        logprobs[place] = turn.output_logprobs
    assert (leaf["loss_mask"], leaf["rollout_logp"]) == (mask, logprobs), turns[-1].rid


def in_danger(chats: Sequence[StatedChat]) -> list[StatedChat]:
    """Conversations that had something to lose: they went on behind a kill."""
    return [chat for chat in chats if len({heard.life for heard in chat.heard}) > 1]


def is_enough(chats: Sequence[StatedChat]) -> bool:
    """True when conversations of all kinds were in danger."""
    seen = in_danger(chats)
    return (
        len(seen) > len(CLIENTS)
        and {chat.streamed for chat in seen} == {chat.tools for chat in seen} == {True, False}
        and any(chat.session is None for chat in seen)
        and any(chat.name.endswith("fork") and len(chat.heard) > FORK_AFTER for chat in seen)
        and any("tool_calls" in message for chat in seen for message in chat.messages)
    )


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_conversation_stays_one_exact_sample_over_kills(tmp_path: Path) -> None:
    port = free_port()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        speaking(QWEN3, by_text(QWEN3.tokenizer, reply), tokens_per_second=150) as engine,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False, limits=limits
        ) as client,
        anyio.create_task_group() as tasks,
    ):
        flags = [
            *("--port", str(port), "--log-level", "warn", "--worker-urls", engine.url),
            *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint, "--gc-threshold-k", "0"),
            *("--trajectory-log", str(tmp_path / "log"), "--plugin", "openai"),
        ]
        clients = Clients(client)
        for life in count():
            clients.life = life
            with started(Program(flags, tmp_path / "router.log")) as router:
                await listening(client, router)
                if not life:
                    for number, habit in enumerate(CLIENTS.values()):
                        tasks.start_soon(clients.converse, number, habit)
                journal = {entry.rid: entry for entry in engine.journal()}
                check_answers(clients.chats, journal)
                await check_samples(client, clients.chats, journal)
                if life >= KILLS and is_enough(clients.chats):
                    break
                assert life < MOST_KILLS, "what went on behind a kill was not of all kinds"
                clients.steady.set()
                await clients.heard.more(random.randint(ANSWERS // 2, ANSWERS))
                await anyio.sleep(random.uniform(0, 0.1))  # while others are being answered
                clients.steady = anyio.Event()
                router.kill()  # SIGKILL
        tasks.cancel_scope.cancel()
